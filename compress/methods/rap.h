// RAP: keeps only the most important RoPE pairs of each key head, and stores
// values as low-rank latents.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "compress/methods/method.h"
#include "compress/methods/rope_budget.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

// How the RoPE pairs of a head are scored.
enum class PairScore {
  kFisher,     // the Fisher information of the pair's two rows of k_proj
  kMagnitude,  // the mean over tokens of the pair's squared length
};
absl::StatusOr<PairScore> ParsePairScore(const std::string& name);
std::string PairScoreName(PairScore score);

struct RapOptions {
  PairScore pair_score = PairScore::kFisher;
  BudgetOptions budget;
  // How to find the factors of values, and of keys that do not rotate.
  Decomposition decomposition = Decomposition::kWhitened;
};

// Makes a plan. All heads of a layer keep the same number of RoPE pairs. Each
// KV head keeps its pairs with the best scores, and its query heads keep the
// same pairs (FOLD). Values, and key dims that do not rotate, become low-rank
// latents of single heads, which are not rebuilt. The plan's method is "rap".
// Errors: those of ShareBudget; INVALID_ARGUMENT for weights that are not
//   finite.
absl::StatusOr<kvasir::v1::KvPlan> PlanRap(const PlanRequest& request,
                                           const RapOptions& options);

}  // namespace kvasir::compress
