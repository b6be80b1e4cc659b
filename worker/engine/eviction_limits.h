// Checks a request's own eviction budget: how many slots of its sequences stay,
// instead of what the served plan keeps. Pure functions.
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
    cache::SequencePages pages;  // of one sequence, with the plan's counts
    // Sinks and recent tokens, which always stay: the maximum over the layers.
    int64_t least_slots = 0;
    int64_t num_pages = 0;  // in the pool
  };
  std::vector<Group> groups;  // by page group
  // The smallest budget that the operator allows. A request may also keep as
  // little as the plan does. Empty: the plan's budget is the smallest.
  std::optional<proto::EvictionBudget> min_budget;
  // The number of positions that the model supports. No sequence may hold more
  // slots, although it may see more tokens. 0: no bound.
  int64_t max_slots = 0;

  bool evicts() const;
};

// The limits of a plan. The engine adds `min_budget` and the pool's pages.
EvictionLimits EvictionLimitsOf(const plan::ResolvedPlan& plan);

// INVALID_ARGUMENT if there is a `min_budget` but the plan evicts nothing.
absl::Status CheckEvictionLimits(const EvictionLimits& limits);

struct SequenceLength {
  int64_t prompt_tokens = 0;  // at least 1
  int64_t total_tokens = 0;   // at the output's end
};

// INVALID_ARGUMENT names the budget and the limit: the budget keeps too few
// slots, or so many that a sequence could outgrow the pool.
absl::Status CheckEvictionBudget(const proto::EvictionBudget& budget,
                                 const SequenceLength& length,
                                 const EvictionLimits& limits);

// The counts for the cache, by page group, of a budget that was checked. A
// ratio of 1 evicts nothing, neither of the prompt nor of the output.
std::vector<plan::EvictionCounts> EvictionsOf(
    const proto::EvictionBudget& budget, const EvictionLimits& limits);

}  // namespace kvasir::worker
