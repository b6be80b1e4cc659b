// Chooses which slots of a unit stay at an eviction. Every engine follows this
// rule.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/resolved_plan.h"

namespace kvasir::compress {

// The scores of n slots of one unit, in their order. A list of errors may be
// empty, which means that all errors are equal.
struct SlotScores {
  std::span<const float> mass;  // S
  std::span<const float> key_error;
  std::span<const float> value_error;
};

// Returns `kept` of the n slots, ascending: the first `sinks`, the last
// `recent`, and the best of those between, the candidates. The score of a
// candidate is
//   lambda * norm(S) + (1 - lambda) * f * ((1 - norm(Ek)) + (1 - norm(Ev)))
// Here f is the friendliness factor, and norm(x) = (x - least) / (greatest -
// least) over the candidates, or 0 if all are equal. Equal scores prefer the
// lower slot. All arithmetic is float32, as written. If the rule has no scores
// (streaming), the first `sinks` and the latest slots stay. sinks + recent <=
// kept <= n (CHECK).
std::vector<int64_t> ChooseSlots(const plan::ResolvedEviction& rule,
                                 const SlotScores& scores, int64_t kept);

}  // namespace kvasir::compress
