// How many pages one sequence takes in a page group: the calculator behind the
// layout's sizes, the cache's answers and the scheduler's admission.
#pragma once

#include <cstdint>

#include "plan/resolved_plan.h"

namespace kvasir::cache {

// Keeps every product of the calculators inside int64.
inline constexpr int64_t kMaxSequenceTokens = int64_t{1} << 30;

// First token that the query at position `logical_tokens` still sees: all
// before it may be given up. 0 without a window.
int64_t FirstVisibleToken(int64_t sliding_window, int64_t logical_tokens);

// What a page group asks of each of its sequences. Pure arithmetic.
struct SequencePages {
  int64_t page_tokens = 0;  // P
  // Owned beside the pages of tokens: basis, mean, exact rows.
  int64_t side_pages = 0;
  // Keys that a query sees at most, itself included; 0: all before it.
  int64_t sliding_window = 0;
  plan::EvictionCounts eviction;

  // Pages held at most on the way to a length of `length_tokens` (0 ..
  // kMaxSequenceTokens, CHECK), side pages included, when it is written in
  // steps of at most `chunk_tokens` and gives up pages behind the window before
  // each step. With eviction, steps end where one is due. A fork holds as many:
  // the copy that it makes of a partly filled page takes that page's place.
  int64_t Held(int64_t length_tokens, int64_t chunk_tokens) const;

  // Of them, those still to be had by a sequence that starts behind
  // `found_tokens` (whole pages) of a prefix: it holds what of these pages the
  // window has left, and no side page.
  int64_t Missing(int64_t length_tokens, int64_t chunk_tokens,
                  int64_t found_tokens) const;
};

}  // namespace kvasir::cache
