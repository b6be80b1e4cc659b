// What keys and values of each layer keep: the budgets that the planners on
// RoPE pairs share.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "compress/methods/low_rank_plan.h"
#include "compress/methods/method.h"

namespace kvasir::compress {

// What the kept share of a layer's side goes by.
enum class BudgetScore {
  kUniform,     // the same everywhere
  kFisher,      // Fisher information, summed over its weights
  kFisherRoot,  // the root of each weight's, summed
  kEnergy,      // keys: a measure of the planner's own; values: uniform
};
absl::StatusOr<BudgetScore> ParseBudgetScore(const std::string& name);
std::string BudgetScoreName(BudgetScore score);

struct BudgetOptions {
  BudgetScore score = BudgetScore::kFisherRoot;
  // Values stay whole; keys alone make the kept share come true.
  bool keep_values = false;
  // Kept share of the key numbers alone; values share what `keep` leaves them
  // (and at most all of it). Not with keep_values, where keep says it.
  std::optional<double> key_keep;
};
std::string BudgetOptionsText(const BudgetOptions& options);

// Numbers that a token's latents of one layer have.
struct LayerBudget {
  int64_t pair_dims = 0;   // per key group: dims that rotate, even
  int64_t rest_rank = 0;   // per key group: dims that do not
  int64_t value_rank = 0;  // per KV head; D: whole values
};

// Shares, multiples, groups and calibration were checked (CheckPlanRequest,
// HeadGroups). Scores by Fisher information share one pool of keys and values
// of all layers, unless key_keep or keep_values part the sides; else each side
// has its own. Pairs are kept alike by all groups of a layer, so are ranks.
// `key_energy` [L] is for kEnergy. A pool's sum is never above its budget, and
// short of it by less than the smallest step that one of its units could still
// take: rank_multiple (or EvenMultiple) in every group of a layer.
// Errors: INVALID_ARGUMENT for a share that is out of range or leaves a side
// nothing, for both key_keep and keep_values, for kEnergy without key_energy;
// FAILED_PRECONDITION without Fisher information where it is needed.
absl::StatusOr<std::vector<LayerBudget>> ShareBudget(
    const PlanRequest& request, const BudgetOptions& options,
    const std::vector<HeadGroup>& groups,
    const std::vector<double>& key_energy = {});

// Kept dims of a rotating group are multiples of this: the request's rank
// multiple, or twice it if that is odd.
int64_t EvenMultiple(const PlanRequest& request);

// Values of a layer, every head alike: whole if nothing was taken from them.
kvasir::v1::Part ValuePart(const PlanRequest& request, int64_t layer,
                           int64_t rank);

}  // namespace kvasir::compress
