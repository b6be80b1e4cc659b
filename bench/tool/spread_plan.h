// Stretches a plan that was made for one model over the shape of another, to
// measure what its cache would cost there. Only for benchmarks, because no
// checkpoint has tensors for the stretched plan.
#pragma once

#include "absl/status/statusor.h"
#include "plan/attention_shape.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::cli {

// Returns a plan like `plan` for `shape`; the heads of both must have the same
// number of dimensions. The plan's layers are spread over the layers of `shape`
// in order. Groups of one head stay groups of one head, and groups of all heads
// become groups of all heads. Each latent keeps its shares of bit widths,
// rounded to 8 channels; a rope_low_rank latent keeps its channels for each
// RoPE pair and head. If the shapes are equal, the plan is returned unchanged.
// Errors: UNIMPLEMENTED for other groups; INVALID_ARGUMENT for groups without
// heads or rank, and for runs that are wider than their group.
absl::StatusOr<kvasir::v1::KvPlan> SpreadPlan(
    const kvasir::v1::KvPlan& plan, const plan::AttentionShape& shape);

}  // namespace kvasir::cli
