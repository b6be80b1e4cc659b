// Computes the number of pages that one sequence takes in a page group. The
// layout, the cache and the scheduler's admission all use this calculator, so
// that they agree.
#pragma once

#include <cstdint>

#include "plan/resolved_plan.h"

namespace kvasir::cache {

// The longest sequence. With this limit, no product of the calculators
// overflows int64.
inline constexpr int64_t kMaxSequenceTokens = int64_t{1} << 30;

// The first token that the query at position `logical_tokens` attends to; all
// tokens before it may be given up. 0 without a window.
int64_t FirstVisibleToken(int64_t sliding_window, int64_t logical_tokens);

// Computes the pages that a sequence needs in one page group. Pure arithmetic.
struct SequencePages {
  int64_t page_tokens = 0;
  // The number of pages that a sequence owns in addition to its token pages,
  // for basis, mean and exact rows.
  int64_t side_pages = 0;
  // A query attends to at most this many keys, its own token's included. 0: no
  // sliding window.
  int64_t sliding_window = 0;
  plan::EvictionCounts eviction;

  // The most pages, side pages included, that a sequence holds at any time
  // until it has `length_tokens` tokens (0 .. kMaxSequenceTokens, CHECK). The
  // sequence is written in steps of at most `chunk_tokens`, and gives up pages
  // outside the window before each step. With eviction, steps end at eviction
  // points. A fork holds no more pages than that, because it has its own copy
  // of the partly filled page instead of the parent's page.
  int64_t Held(int64_t length_tokens, int64_t chunk_tokens) const;

  // The number of further pages that a sequence needs to reach Held() if it
  // starts with a cached prefix of `found_tokens` tokens, which fill whole
  // pages. At its start the sequence holds the prefix's pages inside the
  // window, but no side page.
  int64_t Missing(int64_t length_tokens, int64_t chunk_tokens,
                  int64_t found_tokens) const;
};

}  // namespace kvasir::cache
