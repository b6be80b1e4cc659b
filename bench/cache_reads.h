// The bytes that a decode step reads of the cache, computed from the layout of
// its pages.
#pragma once

#include <cstdint>

#include "cache/layout/layout.h"

namespace kvasir::bench {

// Bytes that the last of `length_tokens` tokens reads, itself included: the
// payload of the slots that it sees (a sliding window hides the others), and
// exact rows in place of the first and latest codes. `prompt_tokens` is the
// length of the prompt if slots were evicted from it; 0: none were evicted.
double CacheBytesRead(const cache::PageLayout& layout, int64_t length_tokens,
                      int64_t prompt_tokens = 0);

}  // namespace kvasir::bench
