// RoPE-commuting low rank: keys of a group as complex latents at each RoPE pair
// (compress/methods/rope_factors.h), which need no rebuilding. RAP's keys are
// the case of one head per group.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "compress/methods/method.h"
#include "compress/methods/rope_budget.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

struct CommutingOptions {
  // KV heads that share a latent; 0: all of a tensor-parallel rank.
  int64_t group_heads = 0;
  // The plan carries them to the applier.
  CommutingWeights weights;
  // Layers share alike unless told otherwise. kEnergy: by the weighted energy
  // of their keys.
  BudgetOptions budget = {.score = BudgetScore::kUniform};
  // kSvd: of the weights alone; else whitened.
  Decomposition decomposition = Decomposition::kWhitened;
};

// A layer keeps the complex channels of most energy out of one pool of its
// groups and pairs (with tp > 1 every group equally many). Dims that do not
// rotate, and values, become low-rank latents, absorbed; the former keep the
// share of the pairs unless scored by Fisher information. Method "commuting".
// Errors: as ShareBudget, INVALID_ARGUMENT for groups that do not divide the
// heads and for weights that are not finite.
absl::StatusOr<kvasir::v1::KvPlan> PlanCommuting(
    const PlanRequest& request, const CommutingOptions& options);

}  // namespace kvasir::compress
