// A plan that was made for one model on the shape of another: what its cache
// would cost there. Benchmarks only; such a plan has no tensors.
#pragma once

#include "absl/status/statusor.h"
#include "plan/attention_shape.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::cli {

// Layers of `shape` get those of the plan in order, stretched over its depth;
// groups of one head stay so, and groups of all heads become groups of all.
// Each latent keeps its share of channels of each width, to a multiple of 8,
// and one that commutes as many of each pair for a head. A plan of this shape
// comes back as it is. UNIMPLEMENTED: other groups. INVALID_ARGUMENT: groups
// without heads or rank, runs wider than they. Heads of both shapes have as
// many dims.
absl::StatusOr<kvasir::v1::KvPlan> SpreadPlan(
    const kvasir::v1::KvPlan& plan, const plan::AttentionShape& shape);

}  // namespace kvasir::cli
