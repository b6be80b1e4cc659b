// The eviction budget: how many cache slots a sequence keeps after evictions.
// Flags, requests and the planner use this form.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvasir::proto {

// The budget is either a number of slots or a share of the prompt; the unused
// field is 0.
struct EvictionBudget {
  uint32_t tokens = 0;
  double ratio = 0;

  bool operator==(const EvictionBudget&) const = default;
};

// Parses "0.2" (a fifth of the prompt), "1" (the whole prompt) or "256"
// (slots). Returns INVALID_ARGUMENT if the text is neither a share above 0 and
// at most 1 nor a whole number of at least 2.
absl::StatusOr<EvictionBudget> ParseEvictionBudget(absl::string_view text);

// Returns the text that ParseEvictionBudget turns back into `budget`.
std::string EvictionBudgetText(const EvictionBudget& budget);

}  // namespace kvasir::proto
