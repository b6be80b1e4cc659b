// The number of pages that one sequence takes in a page group. The layout's
// sizes, the cache's answers and the scheduler's admission all use this
// calculator.
#pragma once

#include <cstdint>

#include "plan/resolved_plan.h"

namespace kvasir::cache {

// Keeps every product of the calculators inside int64.
inline constexpr int64_t kMaxSequenceTokens = int64_t{1} << 30;

// The first token that the query at position `logical_tokens` still sees; all
// tokens before it may be given up. 0 without a window.
int64_t FirstVisibleToken(int64_t sliding_window, int64_t logical_tokens);

// The needs of each sequence in a page group. Pure arithmetic.
struct SequencePages {
  int64_t page_tokens = 0;  // P
  // Pages that a sequence owns in addition to its token pages, for basis, mean
  // and exact rows.
  int64_t side_pages = 0;
  // The most keys that a query sees, itself included. 0: all keys before it.
  int64_t sliding_window = 0;
  plan::EvictionCounts eviction;

  // The most pages held on the way to a length of `length_tokens` (0 ..
  // kMaxSequenceTokens, CHECK), side pages included. The sequence is written in
  // steps of at most `chunk_tokens`, and gives up pages outside the window
  // before each step. With eviction, steps end where an eviction is due. A fork
  // holds as many: its copy of a partly filled page takes that page's place.
  int64_t Held(int64_t length_tokens, int64_t chunk_tokens) const;

  // How many of these pages a sequence still needs if it starts after
  // `found_tokens` (whole pages) of a prefix. It then holds the found pages
  // that are inside the window, and no side page.
  int64_t Missing(int64_t length_tokens, int64_t chunk_tokens,
                  int64_t found_tokens) const;
};

}  // namespace kvasir::cache
