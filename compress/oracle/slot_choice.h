// Which slots of a unit stay at an eviction: the rule that every engine
// follows.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/resolved_plan.h"

namespace kvasir::compress {

// What is known of n slots of one unit, in their order. Errors may be empty:
// they are all the same.
struct SlotScores {
  std::span<const float> mass;  // S
  std::span<const float> key_error;
  std::span<const float> value_error;
};

// `kept` of the n slots, ascending: the first `sinks`, the last `recent`, and
// of those between, the candidates, the ones with the greatest
//   lambda * norm(S) + (1 - lambda) * f * ((1 - norm(Ek)) + (1 - norm(Ev)))
// with f the factor of friendliness and norm(x) = (x - least) / (greatest -
// least) over the candidates, 0 where all are the same. The lower slot comes
// first among equals. Float32, as written. Where others stay as the latest, the
// first `sinks` and the last ones. sinks + recent <= kept <= n (CHECK).
std::vector<int64_t> ChooseSlots(const plan::ResolvedEviction& rule,
                                 const SlotScores& scores, int64_t kept);

}  // namespace kvasir::compress
