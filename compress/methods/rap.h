// RAP: keys keep whole RoPE pairs of their heads; values become low-rank
// latents.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "compress/methods/method.h"
#include "compress/methods/rope_budget.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

// How the pairs of a head are ranked.
enum class PairScore {
  kFisher,     // Fisher information of its two rows
  kMagnitude,  // mean over tokens of its squared length
};
absl::StatusOr<PairScore> ParsePairScore(const std::string& name);
std::string PairScoreName(PairScore score);

struct RapOptions {
  PairScore pair_score = PairScore::kFisher;
  BudgetOptions budget;
  // For the values, and for keys that do not rotate.
  Decomposition decomposition = Decomposition::kWhitened;
};

// All heads of a layer keep equally many pairs; each keeps its own best ones,
// and its query heads take the same (FOLD). Dims that do not rotate, and
// values, become absorbed low-rank latents per head. Method "rap".
// Errors: those of ShareBudget; INVALID_ARGUMENT for weights that are not
//   finite.
absl::StatusOr<kvasir::v1::KvPlan> PlanRap(const PlanRequest& request,
                                           const RapOptions& options);

}  // namespace kvasir::compress
