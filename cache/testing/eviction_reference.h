// The policy of eviction in the plainest words, slot by slot: what devices and
// the oracle are compared with.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/resolved_plan.h"

namespace kvasir::cache {

// What one unit of a layer holds of a sequence.
class EvictionReference {
 public:
  struct Slot {
    int64_t position = 0;
    float mass = 0;  // S
    float key_error = 0;
    float value_error = 0;
  };

  EvictionReference(const plan::ResolvedEviction& rule,
                    const plan::EvictionCounts& counts, int64_t prompt_tokens);

  // The next token comes. Slots go before it does, where it is time: returns
  // those that stayed, ascending, as they were; empty: nothing went.
  std::vector<int32_t> Append(float key_error, float value_error);

  std::vector<Slot>& slots() { return slots_; }
  const std::vector<Slot>& slots() const { return slots_; }

 private:
  float WorthOf(const Slot& slot) const;
  std::vector<int32_t> Evict();

  const plan::ResolvedEviction rule_;
  const plan::EvictionCounts counts_;
  const int64_t prompt_;
  int64_t length_ = 0;
  std::vector<Slot> slots_;
};

}  // namespace kvasir::cache
