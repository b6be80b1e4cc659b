// The method "commuting": low-rank keys whose lift (the matrix that computes
// keys from latents) commutes with RoPE. At each RoPE pair, the keys of a group
// of heads become complex latents (compress/methods/rope_factors.h). Attention
// works on these latents and does not rebuild the keys. With one head per
// group, the method keeps whole RoPE pairs of each head, as RAP does.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "compress/methods/method.h"
#include "compress/methods/rope_budget.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

struct CommutingOptions {
  // Number of KV heads that share a latent; 0: all heads of a tensor-parallel
  // rank.
  int64_t group_heads = 0;
  // How the heads of a group are weighted. The plan records the weighting, so
  // that ApplyLayerPlan uses the same one.
  CommutingWeights weights;
  // By default all layers keep the same share of their numbers. With kEnergy, a
  // layer's share grows with the weighted energy of its keys.
  BudgetOptions budget = {.score = BudgetScore::kUniform};
  // kSvd uses only the weights; with any other value the factors are whitened
  // by the calibration inputs.
  Decomposition decomposition = Decomposition::kWhitened;
};

// Makes a plan. Over all groups and pairs of a layer, the complex channels with
// the most energy are kept. With tp > 1 every group keeps the same number of
// channels. Values, and key dims that do not rotate, become low-rank latents
// that are not rebuilt. Key dims that do not rotate keep the same share as the
// pairs, unless the budget is shared by Fisher information.
// Errors: those of ShareBudget; INVALID_ARGUMENT for groups that do not divide
//   the heads and for weights that are not finite.
absl::StatusOr<kvasir::v1::KvPlan> PlanCommuting(
    const PlanRequest& request, const CommutingOptions& options);

}  // namespace kvasir::compress
