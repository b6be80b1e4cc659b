#include "cache/layout/sequence_pages.h"

#include <algorithm>

#include "base/check.h"
#include "cache/eviction/eviction_schedule.h"

namespace kvasir::cache {
namespace {

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

int64_t FirstVisibleToken(int64_t sliding_window, int64_t logical_tokens) {
  if (sliding_window == 0 || logical_tokens < sliding_window) return 0;
  return logical_tokens - sliding_window + 1;
}

int64_t SequencePages::Held(int64_t length_tokens, int64_t chunk_tokens) const {
  KVASIR_CHECK(page_tokens >= 1);
  KVASIR_CHECK(length_tokens >= 0 && length_tokens <= kMaxSequenceTokens);
  // A step writes at least one token, and at most the whole sequence.
  const int64_t chunk =
      std::clamp(chunk_tokens, int64_t{1}, std::max(int64_t{1}, length_tokens));
  const int64_t all = CeilDiv(MostSlots(eviction, length_tokens), page_tokens);
  if (sliding_window == 0 || sliding_window > length_tokens) {
    return side_pages + all;
  }
  // The slots held during a step: its own tokens and the window before the
  // first of them. The page count assumes the worst alignment to page borders.
  const int64_t live = sliding_window - 1 + chunk;
  return side_pages + std::min(all, CeilDiv(live - 1, page_tokens) + 1);
}

int64_t SequencePages::Missing(int64_t length_tokens, int64_t chunk_tokens,
                               int64_t found_tokens) const {
  const int64_t found =
      found_tokens / page_tokens -
      FirstVisibleToken(sliding_window, found_tokens) / page_tokens;
  return std::max<int64_t>(0, Held(length_tokens, chunk_tokens) - found);
}

}  // namespace kvasir::cache
