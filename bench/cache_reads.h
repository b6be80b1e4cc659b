// What a decode step reads of the cache, by the layout of its pages.
#pragma once

#include <cstdint>

#include "cache/layout/layout.h"

namespace kvasir::bench {

// Bytes that the query behind `length_tokens - 1` tokens reads, itself
// included: payload of the slots that it sees (a sliding window hides the
// others), and exact rows in place of the first and latest codes. Where slots
// are evicted, of a sequence with so many tokens of prompt; 0: nothing went.
double CacheBytesRead(const cache::PageLayout& layout, int64_t length_tokens,
                      int64_t prompt_tokens = 0);

}  // namespace kvasir::bench
