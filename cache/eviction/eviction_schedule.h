// Determines when slots of a sequence are evicted, and how many stay. This
// depends only on the plan's counts, the prompt's length and the number of
// tokens so far. The executor decides which slots stay, because it has the
// scores. Below, K is the number of slots that stay (KeptSlots), and E
// is EvictionCounts::every_tokens.
//
//   slots:  K + E |        /|      /|
//                 |       / |  /| / |/|  /
//               K |      /  |_/ |/  / |_/
//                 |   /
//                 +---------|---|--|--|----> tokens seen
//                           points: multiples of E beyond K, and the prompt's
//                           end
//
// An eviction point is a number of tokens. When the sequence has this number of
// tokens, slots are evicted before its next step. So a step must end at each
// point that it reaches. Points depend only on lengths, and no step crosses
// one. So a token always sees the same slots: chunk sizes, the rest of the
// batch and preemptions do not matter. Slots of a prompt are already evicted
// while it is computed, so a prompt larger than the pool can be served.
//
// The functions are pure, so any thread may call them. The policy is based on
// the papers Q-Hitter and H2O. They evict at the prompt's end and then at every
// token; Kvasir evicts only at the points above.
#pragma once

#include <cstdint>
#include <optional>

#include "plan/resolved_plan.h"

namespace kvasir::cache {

// Returns K: how many slots a sequence with a prompt of `prompt_tokens` keeps
// at an eviction point. At least 1.
int64_t KeptSlots(const plan::EvictionCounts& counts, int64_t prompt_tokens);

// Returns `counts` with a fixed budget: KeptSlots for this prompt replaces a
// budget that is a share of the prompt. So output tokens do not increase
// the budget.
plan::EvictionCounts OfPrompt(const plan::EvictionCounts& counts,
                              int64_t prompt_tokens);

// Returns the most slots that a sequence holds at any time until it has
// `length` tokens, for any length of its prompt. This is at most K + E, with
// the K of a prompt of `length` tokens, if no step crosses an eviction point.
int64_t MostSlots(const plan::EvictionCounts& counts, int64_t length);

class EvictionSchedule {
 public:
  // Makes a schedule that evicts nothing.
  EvictionSchedule() = default;
  // prompt_tokens >= 1 (CHECK).
  EvictionSchedule(const plan::EvictionCounts& counts, int64_t prompt_tokens);

  // True if slots are evicted when the sequence has `length` tokens.
  bool IsPoint(int64_t length) const;
  // The smallest point above `length`, where the next step must end at the
  // latest. Empty: there is none.
  std::optional<int64_t> NextPoint(int64_t length) const;

  // The number of slots that a sequence holds at `length` tokens, before and
  // after the eviction at this length. The two numbers differ only if `length`
  // is a point.
  int64_t SlotsBefore(int64_t length) const;
  int64_t SlotsAfter(int64_t length) const;

  // kept_slots() and prompt_tokens() are 0 if nothing is evicted.
  int64_t kept_slots() const { return kept_; }
  int64_t prompt_tokens() const { return every_ > 0 ? prompt_ : 0; }

  // A query is counted if its attention is added to the scores that decide
  // which slots are evicted. Returns the first counted query of [begin, end),
  // or `end`; all later ones are counted too. Output queries always count.
  // Without an observation window, all queries of the prompt count. With a
  // window, only the last queries before each point and before the prompt's end
  // count, as many as the window has. Neither a point nor the prompt's end may
  // lie inside (begin, end).
  int64_t FirstCounted(int64_t begin, int64_t end) const;

 private:
  // The greatest point that is not above `length`. 0: there is none.
  int64_t LastPoint(int64_t length) const;

  int64_t prompt_ = 0;
  int64_t every_ = 0;  // 0: nothing is evicted
  int64_t window_ = 0;
  int64_t kept_ = 0;
};

}  // namespace kvasir::cache
