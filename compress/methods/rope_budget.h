// Budgets of the planners on RoPE pairs: how much of the keys and values each
// layer keeps.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "compress/methods/low_rank_plan.h"
#include "compress/methods/method.h"

namespace kvasir::compress {

// The score that determines the kept share of a layer's side.
enum class BudgetScore {
  kUniform,     // the same share everywhere
  kFisher,      // Fisher information, summed over its weights
  kFisherRoot,  // the sum of the roots of each weight's information
  kEnergy,      // keys: a measure that the planner provides; values: uniform
};
absl::StatusOr<BudgetScore> ParseBudgetScore(const std::string& name);
std::string BudgetScoreName(BudgetScore score);

struct BudgetOptions {
  BudgetScore score = BudgetScore::kFisherRoot;
  // Values stay whole; only keys are reduced to meet the kept share.
  bool keep_values = false;
  // Kept share of the key numbers; values get what `keep` leaves for them, at
  // most all of their numbers. Not together with keep_values, where `keep`
  // determines the keys' share.
  std::optional<double> key_keep;
};
std::string BudgetOptionsText(const BudgetOptions& options);

// The sizes of a layer's latents, in numbers per token.
struct LayerBudget {
  int64_t pair_dims = 0;   // per key group: dims that rotate, even
  int64_t rest_rank = 0;   // per key group: dims that do not rotate
  int64_t value_rank = 0;  // per KV head; D: whole values
};

// Shares, multiples, groups and calibration must have been checked
// (CheckPlanRequest, HeadGroups). With scores by Fisher information, keys and
// values of all layers share one pool, unless key_keep or keep_values separate
// the sides; otherwise each side has its own pool. All groups of a layer keep
// equally many pairs and have equal ranks. `key_energy` [L] is for kEnergy. The
// sum of a pool never exceeds its budget. It is below the budget by less than
// the smallest step that one of its units could still take: rank_multiple (or
// EvenMultiple) in every group of a layer.
// Errors: INVALID_ARGUMENT for a share that is out of range or leaves a side
//   nothing, for both key_keep and keep_values, and for kEnergy without
//   key_energy; FAILED_PRECONDITION if Fisher information is needed and
//   missing.
absl::StatusOr<std::vector<LayerBudget>> ShareBudget(
    const PlanRequest& request, const BudgetOptions& options,
    const std::vector<HeadGroup>& groups,
    const std::vector<double>& key_energy = {});

// The number of kept dims of a rotating group is a multiple of this: the
// request's rank multiple, or twice that if it is odd.
int64_t EvenMultiple(const PlanRequest& request);

// The value part of a layer, with equal ranks for all heads. If nothing was
// removed, the values are stored whole.
kvasir::v1::Part ValuePart(const PlanRequest& request, int64_t layer,
                           int64_t rank);

}  // namespace kvasir::compress
