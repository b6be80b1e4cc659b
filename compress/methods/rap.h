// RAP: keys that keep whole RoPE pairs of their heads, values of low rank.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "compress/methods/method.h"
#include "compress/methods/rope_budget.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

// What a pair of a head is kept for.
enum class PairScore {
  kFisher,     // Fisher information of its two rows
  kMagnitude,  // mean over tokens of its squared length
};
absl::StatusOr<PairScore> ParsePairScore(const std::string& name);
std::string PairScoreName(PairScore score);

struct RapOptions {
  PairScore pair_score = PairScore::kFisher;
  BudgetOptions budget;
  // Of the values, and of keys that do not rotate.
  Decomposition decomposition = Decomposition::kWhitened;
};

// Heads of a layer keep equally many pairs, each its own best ones; its query
// heads take the same (FOLD). Dims that do not rotate, and values, become
// low-rank latents per head, absorbed. Method "rap".
// Errors: as ShareBudget, and INVALID_ARGUMENT for weights that are not finite.
absl::StatusOr<kvasir::v1::KvPlan> PlanRap(const PlanRequest& request,
                                           const RapOptions& options);

}  // namespace kvasir::compress
