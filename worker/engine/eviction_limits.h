// Checks the eviction budgets of requests. A budget is the number of cache
// slots that each sequence of a request keeps, or a share of its prompt. It
// replaces that of the served plan. Pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "cache/layout/sequence_pages.h"
#include "plan/resolved_plan.h"
#include "proto/eviction_budget.h"

namespace kvasir::worker {

struct EvictionLimits {
  struct Group {
    // How many pages one sequence needs under the plan's own budget.
    cache::SequencePages pages;
    // The number of slots that are never evicted (sinks and recent tokens), in
    // the layer of the group that has the most.
    int64_t least_slots = 0;
    int64_t num_pages = 0;  // pages of this group in the pool
  };
  std::vector<Group> groups;  // one element for each page group
  // The smallest budget that the operator allows; the plan's own budget is
  // allowed in any case. Empty: a request must keep at least as many slots as
  // the plan.
  std::optional<proto::EvictionBudget> min_budget;
  // The most slots that a sequence may hold: the model's number of positions.
  // Evicted tokens need no slot, so a sequence may have more tokens. 0: no
  // limit.
  int64_t max_slots = 0;

  bool evicts() const;
};

// Returns the limits that follow from the plan: each group's eviction counts
// and `least_slots`. The caller must set everything else, such as `min_budget`,
// `max_slots`, and each group's `num_pages` and `pages`.
EvictionLimits EvictionLimitsOf(const plan::ResolvedPlan& plan);

// Returns INVALID_ARGUMENT if `min_budget` is set although the plan evicts
// nothing.
absl::Status CheckEvictionLimits(const EvictionLimits& limits);

struct SequenceLength {
  int64_t prompt_tokens = 0;  // at least 1
  int64_t total_tokens = 0;   // prompt and the longest output
};

// Returns INVALID_ARGUMENT, with the budget and the limit, if the budget keeps
// fewer slots than `limits` require, or more slots than the model has positions
// or than the pool can hold for one sequence.
absl::Status CheckEvictionBudget(const proto::EvictionBudget& budget,
                                 const SequenceLength& length,
                                 const EvictionLimits& limits);

// Converts a budget that CheckEvictionBudget has accepted into counts for each
// page group. If the budget is the whole prompt, nothing is evicted, neither
// from the prompt nor from the output.
std::vector<plan::EvictionCounts> EvictionsOf(
    const proto::EvictionBudget& budget, const EvictionLimits& limits);

}  // namespace kvasir::worker
