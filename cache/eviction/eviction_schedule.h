// When a sequence gives up slots, and how many stay: from the plan's counts,
// the prompt's length and the tokens so far, and from nothing else. Which slots
// stay is decided where their scores are.
//
//   slots:  K + E |        /|      /|
//                 |       / |  /| / |/|  /
//               K |      /  |_/ |/  / |_/
//                 |   /
//                 +---------|---|--|--|----> tokens seen
//                           points: multiples of E beyond K, and the prompt's
//                           end
//
// A point is a number of tokens. Slots go behind the step that wrote the last
// of these tokens and before the next one is run, so a step must end at each
// point that it reaches. As points depend on lengths alone and no step crosses
// one, every token sees the same slots whatever chunks the tokens came in,
// whoever shared the batch, and when it all is computed again after a
// preemption. A prompt is evicted on its way, so that one larger than the pool
// can be served.
//
// Pure. Threads: any.
// Source: Q-Hitter and H2O evict at the prompt's end and at every token.
#pragma once

#include <cstdint>
#include <optional>

#include "plan/resolved_plan.h"

namespace kvasir::cache {

// K: slots that stay at a point of a sequence of this prompt. At least one.
int64_t KeptSlots(const plan::EvictionCounts& counts, int64_t prompt_tokens);

// The same counts as a number of slots, of a prompt that is known: its output
// adds nothing to a share.
plan::EvictionCounts OfPrompt(const plan::EvictionCounts& counts,
                              int64_t prompt_tokens);

// Slots that a sequence of `length` tokens or fewer ever holds, whatever of it
// is the prompt, where steps end at points: K + E at most.
int64_t MostSlots(const plan::EvictionCounts& counts, int64_t length);

class EvictionSchedule {
 public:
  // Nothing is evicted.
  EvictionSchedule() = default;
  // prompt_tokens >= 1 (CHECK).
  EvictionSchedule(const plan::EvictionCounts& counts, int64_t prompt_tokens);

  // Slots go when `length` tokens are there.
  bool IsPoint(int64_t length) const;
  // The least point above `length`, where the next step ends at the latest;
  // nothing: there is none.
  std::optional<int64_t> NextPoint(int64_t length) const;

  // Slots that hold the first `length` tokens, before and behind the eviction
  // where `length` is a point; else the same.
  int64_t SlotsBefore(int64_t length) const;
  int64_t SlotsAfter(int64_t length) const;

  // Both 0 where nothing is evicted.
  int64_t kept_slots() const { return kept_; }
  int64_t prompt_tokens() const { return every_ > 0 ? prompt_ : 0; }

  // First of the queries [begin, end) that give attention that counts: with an
  // observation window, of the prompt's before a point or its end the last that
  // it has room for; else all. No point lies inside (begin, end), nor does the
  // prompt's end.
  int64_t FirstCounted(int64_t begin, int64_t end) const;

 private:
  // The greatest point that is not above `length`; 0: none.
  int64_t LastPoint(int64_t length) const;

  int64_t prompt_ = 0;
  int64_t every_ = 0;  // 0: nothing is evicted
  int64_t window_ = 0;
  int64_t kept_ = 0;
};

}  // namespace kvasir::cache
