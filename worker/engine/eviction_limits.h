// What a request may say of eviction: how many slots stay of its sequences, in
// place of what the served plan keeps. Pure.
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
    // Of a sequence, with the plan's counts.
    cache::SequencePages pages;
    int64_t least_slots = 0;  // sinks and recent: the most of its layers
    int64_t num_pages = 0;    // of the pool
  };
  std::vector<Group> groups;  // by page group
  // The operator's: requests may keep no less; or as little as the plan does,
  // where that is less. Empty: what the plan keeps.
  std::optional<proto::EvictionBudget> min_budget;
  // Positions that the model knows: no sequence may hold more slots, though it
  // may see more tokens. 0: no bound.
  int64_t max_slots = 0;

  bool evicts() const;
};

// Of a plan, without a min_budget and without a pool: the engine knows that.
EvictionLimits EvictionLimitsOf(const plan::ResolvedPlan& plan);

// INVALID_ARGUMENT for a least budget where nothing is evicted.
absl::Status CheckEvictionLimits(const EvictionLimits& limits);

struct SequenceLength {
  int64_t prompt_tokens = 0;  // at least 1
  int64_t total_tokens = 0;   // at the output's end
};

// Of a request's sequences. INVALID_ARGUMENT names budget and limit; also for
// one with which a sequence may outgrow the pool.
absl::Status CheckEvictionBudget(const proto::EvictionBudget& budget,
                                 const SequenceLength& length,
                                 const EvictionLimits& limits);

// By page group, of a budget that was checked: what the cache is told. A share
// of the whole prompt evicts nothing, of the output either.
std::vector<plan::EvictionCounts> EvictionsOf(
    const proto::EvictionBudget& budget, const EvictionLimits& limits);

}  // namespace kvasir::worker
