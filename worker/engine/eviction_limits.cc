#include "worker/engine/eviction_limits.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "cache/eviction/eviction_schedule.h"

namespace kvasir::worker {
namespace {

using plan::EvictionCounts;
using proto::EvictionBudget;
using proto::EvictionBudgetText;

template <typename... Args>
absl::Status Wrong(const EvictionBudget& budget, const Args&... why) {
  return absl::InvalidArgumentError(
      absl::StrCat("eviction_budget is ", EvictionBudgetText(budget), why...));
}

EvictionCounts CountsOf(const EvictionBudget& budget,
                        const EvictionLimits::Group& group) {
  if (!group.pages.eviction.evicts() || budget.ratio == 1) return {};
  EvictionCounts counts = group.pages.eviction;
  counts.budget_tokens = budget.tokens;
  counts.budget_ratio = budget.ratio;
  counts.least_tokens = budget.tokens > 0 ? 0 : group.least_slots;
  return counts;
}

// Checks that a sequence with this budget keeps enough slots in the page group.
absl::Status CheckKept(const EvictionBudget& budget, int64_t prompt_tokens,
                       const EvictionLimits::Group& group,
                       const std::optional<EvictionBudget>& min_budget) {
  const EvictionCounts counts = CountsOf(budget, group);
  if (!counts.evicts()) return absl::OkStatus();
  if (budget.tokens > 0 && budget.tokens < group.least_slots) {
    return Wrong(budget, " slots, want at least ", group.least_slots,
                 ": sinks and recent tokens always stay");
  }
  const int64_t kept = cache::KeptSlots(counts, prompt_tokens);
  const int64_t plans = cache::KeptSlots(group.pages.eviction, prompt_tokens);
  int64_t least = plans;
  std::string why = "the served plan keeps that many";
  if (min_budget.has_value() && min_budget->ratio != 1) {
    const int64_t operators =
        cache::KeptSlots(CountsOf(*min_budget, group), prompt_tokens);
    if (operators < plans) {
      least = operators;
      why = absl::StrCat("the server's smallest budget is ",
                         EvictionBudgetText(*min_budget));
    }
  }
  if (kept >= least) return absl::OkStatus();
  return Wrong(budget, " and keeps ", kept, " slots at ", prompt_tokens,
               " prompt tokens, want at least ", least, ": ", why);
}

}  // namespace

bool EvictionLimits::evicts() const {
  return std::any_of(groups.begin(), groups.end(), [](const Group& group) {
    return group.pages.eviction.evicts();
  });
}

EvictionLimits EvictionLimitsOf(const plan::ResolvedPlan& plan) {
  EvictionLimits limits;
  for (const plan::ResolvedPageGroup& from : plan.page_groups) {
    EvictionLimits::Group group{.pages = {.eviction = from.eviction}};
    for (const int64_t layer : from.layers) {
      const auto& eviction = plan.layer(layer).eviction;
      if (!eviction.has_value()) continue;
      group.least_slots =
          std::max(group.least_slots, eviction->sinks + eviction->recent);
    }
    limits.groups.push_back(group);
  }
  return limits;
}

absl::Status CheckEvictionLimits(const EvictionLimits& limits) {
  if (!limits.min_budget.has_value() || limits.evicts()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "--eviction-min-budget is ", EvictionBudgetText(*limits.min_budget),
      ", but the served plan evicts nothing: serve a plan that evicts, or add "
      "--eviction"));
}

absl::Status CheckEvictionBudget(const EvictionBudget& budget,
                                 const SequenceLength& length,
                                 const EvictionLimits& limits) {
  // These comparisons are false for NaN, so NaN is refused.
  const bool is_share = budget.ratio > 0 && budget.ratio <= 1;
  if (budget.ratio != 0 ? !is_share || budget.tokens > 0 : budget.tokens == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "eviction_budget: tokens is ", budget.tokens, " and ratio is ",
        budget.ratio,
        ", want exactly one of them set, and a ratio above 0 and at most 1"));
  }
  if (!limits.evicts()) {
    return Wrong(
        budget,
        ", but the served plan evicts nothing: give no eviction_budget");
  }
  for (size_t g = 0; g < limits.groups.size(); ++g) {
    const EvictionLimits::Group& group = limits.groups[g];
    if (!group.pages.eviction.evicts()) continue;
    KVASIR_RETURN_IF_ERROR(
        CheckKept(budget, length.prompt_tokens, group, limits.min_budget));
    cache::SequencePages pages = group.pages;
    pages.eviction =
        cache::OfPrompt(CountsOf(budget, group), length.prompt_tokens);
    const int64_t most = cache::MostSlots(pages.eviction, length.total_tokens);
    if (limits.max_slots > 0 && most > limits.max_slots) {
      return Wrong(budget, ": prompt and output of ", length.total_tokens,
                   " tokens then hold ", most, " slots, want at most the ",
                   limits.max_slots, " positions of the model");
    }
    // The second argument is the size of prefill chunks. It does not matter
    // here, because page groups with eviction have no sliding window.
    const int64_t need = pages.Held(length.total_tokens, length.total_tokens);
    if (need <= group.num_pages) continue;
    return Wrong(budget, ": prompt and output of ", length.total_tokens,
                 " tokens then take ", need, " pages of page group ", g,
                 ", want at most its ", group.num_pages,
                 ": keep fewer slots, or ask for fewer tokens");
  }
  return absl::OkStatus();
}

std::vector<EvictionCounts> EvictionsOf(const EvictionBudget& budget,
                                        const EvictionLimits& limits) {
  std::vector<EvictionCounts> counts;
  for (const EvictionLimits::Group& group : limits.groups) {
    counts.push_back(CountsOf(budget, group));
  }
  return counts;
}

}  // namespace kvasir::worker
