// Stretches a plan that was made for one model over the shape of another, to
// measure what its cache would cost there. Only for benchmarks, because no
// checkpoint has tensors for the stretched plan.
#pragma once

#include "absl/status/statusor.h"
#include "plan/attention_shape.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::cli {

// Returns a plan for `shape` like `plan`. The plan's layers are distributed
// over the layers of `shape` in order. Groups of one head stay groups of one
// head, and groups of all heads become groups of all heads. Each latent keeps
// its share of channels of each bit width, rounded to a multiple of 8; a
// rope_low_rank latent keeps its number of channels of each pair per head. A
// plan that already has this shape is returned unchanged. Heads of both shapes
// must have the same number of dimensions. Errors: UNIMPLEMENTED for other
// groups; INVALID_ARGUMENT for groups without heads or rank, and for runs that
// are wider than their group.
absl::StatusOr<kvasir::v1::KvPlan> SpreadPlan(
    const kvasir::v1::KvPlan& plan, const plan::AttentionShape& shape);

}  // namespace kvasir::cli
