// A simple reference implementation of the eviction policy, which handles one
// slot at a time. Tests compare it with the devices and with the oracle (the
// offline reference decoder).
#pragma once

#include <cstdint>
#include <vector>

#include "plan/resolved_plan.h"

namespace kvasir::cache {

// Simulates a sequence's slots in one eviction unit of a layer (KV heads that
// evict the same tokens).
class EvictionReference {
 public:
  struct Slot {
    int64_t position = 0;
    float mass = 0;  // attention mass
    float key_error = 0;
    float value_error = 0;
  };

  EvictionReference(const plan::ResolvedEviction& rule,
                    const plan::EvictionCounts& counts, int64_t prompt_tokens);

  // Adds the next token. If an eviction is due before it, returns the indices
  // of the slots that stayed, ascending; otherwise returns nothing.
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
