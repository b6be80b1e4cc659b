// Computes the bytes of the cache that a decode step reads, from the layout of
// its pages.
#pragma once

#include <cstdint>

#include "cache/layout/layout.h"

namespace kvasir::bench {

// The bytes that attention reads for the last of `length_tokens` tokens,
// including that token's own: the payload of the slots to which it attends (a
// sliding window excludes the others), with exact rows instead of codes for the
// first and latest tokens. `prompt_tokens` is the length of the prompt if slots
// were evicted; 0: none were evicted.
double CacheBytesRead(const cache::PageLayout& layout, int64_t length_tokens,
                      int64_t prompt_tokens = 0);

}  // namespace kvasir::bench
