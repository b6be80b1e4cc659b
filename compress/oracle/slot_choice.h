// Reference for the slots of a unit that an eviction keeps. The rule is at
// ChooseSlots; evict_select (kernels/eviction) must choose the same slots.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/resolved_plan.h"

namespace kvasir::compress {

// The scores of the n slots of one unit, in slot order. If a list of errors is
// empty, all slots have the same error.
struct SlotScores {
  std::span<const float> mass;       // S: the attention that the slot received
  std::span<const float> key_error;  // Ek
  std::span<const float> value_error;  // Ev
};

// Returns the `kept` slots that stay, ascending: the first `sinks`, the last
// `recent`, and those of the slots in between (the candidates) with the best
// scores. The score of a candidate is
//   lambda * norm(S) + (1 - lambda) * f * ((1 - norm(Ek)) + (1 - norm(Ev)))
// Here f is the friendliness factor, and norm(x) = (x - least) / (greatest -
// least) over the candidates, or 0 if all are equal. Among equal scores the
// lower slot is preferred. All arithmetic is float32, in the order that is
// written here. If the rule has no scores (streaming), the first `sinks` and
// the latest slots stay. sinks + recent <= kept <= n (CHECK).
std::vector<int64_t> ChooseSlots(const plan::ResolvedEviction& rule,
                                 const SlotScores& scores, int64_t kept);

}  // namespace kvasir::compress
