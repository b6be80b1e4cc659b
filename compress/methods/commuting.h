// RoPE-commuting low rank: the keys of a group become complex latents at each
// RoPE pair (compress/methods/rope_factors.h), so attention need not rebuild
// them. RAP's keys are the special case of one head per group.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "compress/methods/method.h"
#include "compress/methods/rope_budget.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

struct CommutingOptions {
  // KV heads that share a latent; 0: all heads of a tensor-parallel rank.
  int64_t group_heads = 0;
  // The plan carries them to the applier.
  CommutingWeights weights;
  // By default all layers get the same share. kEnergy shares by the weighted
  // energy of their keys.
  BudgetOptions budget = {.score = BudgetScore::kUniform};
  // kSvd uses only the weights; other values whiten.
  Decomposition decomposition = Decomposition::kWhitened;
};

// A layer keeps the complex channels of most energy from one pool of its groups
// and pairs. With tp > 1 every group keeps equally many. Dims that do not
// rotate, and values, become absorbed low-rank latents. Dims that do not rotate
// keep the same share as the pairs, unless Fisher information scores them.
// Method "commuting".
// Errors: those of ShareBudget; INVALID_ARGUMENT for groups that do not divide
//   the heads and for weights that are not finite.
absl::StatusOr<kvasir::v1::KvPlan> PlanCommuting(
    const PlanRequest& request, const CommutingOptions& options);

}  // namespace kvasir::compress
