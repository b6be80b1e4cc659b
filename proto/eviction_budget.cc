#include "proto/eviction_budget.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace kvasir::proto {

absl::StatusOr<EvictionBudget> ParseEvictionBudget(absl::string_view text) {
  EvictionBudget budget;
  if (absl::SimpleAtoi(text, &budget.tokens) && budget.tokens > 1) {
    return budget;
  }
  budget.tokens = 0;
  // "1" means the whole prompt (the share 1) and not one slot, because one slot
  // could not keep both the first and the most recent tokens.
  if (absl::SimpleAtod(text, &budget.ratio) && budget.ratio > 0 &&
      budget.ratio <= 1) {
    return budget;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "'", text,
      "' is not an eviction budget: give a number of cache slots, at least 2 "
      "(for example 256), or a share of the prompt above 0 and at most 1 "
      "(for example 0.2)"));
}

std::string EvictionBudgetText(const EvictionBudget& budget) {
  return budget.tokens > 0 ? absl::StrCat(budget.tokens)
                           : absl::StrCat(budget.ratio);
}

}  // namespace kvasir::proto
