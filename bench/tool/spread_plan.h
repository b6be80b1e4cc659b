// Stretches a plan that was made for one model over the shape of another, to
// measure what its cache would cost there. Only for benchmarks: such a plan has
// no tensors.
#pragma once

#include "absl/status/statusor.h"
#include "plan/attention_shape.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::cli {

// The plan's layers are distributed over the layers of `shape` in order. Groups
// of one head stay groups of one head, and groups of all heads become groups of
// all heads. Each latent keeps its share of channels of each bit width, rounded
// to a multiple of 8; a commuting latent keeps as many channels of each pair
// per head. A plan of this shape is returned unchanged. Heads of both shapes
// have the same number of dims. Errors: UNIMPLEMENTED for other groups;
// INVALID_ARGUMENT for groups without heads or rank, and for runs that are
// wider than their group.
absl::StatusOr<kvasir::v1::KvPlan> SpreadPlan(
    const kvasir::v1::KvPlan& plan, const plan::AttentionShape& shape);

}  // namespace kvasir::cli
