// Computes the bytes of the cache that a decode step reads, from the layout of
// its pages.
#pragma once

#include <cstdint>

#include "cache/layout/layout.h"

namespace kvasir::bench {

// Returns how many bytes attention reads for the last token of a sequence of
// `length_tokens` tokens. These are the payloads of all slots in the cache (of
// those in the sliding window, if there is one), including the token's own
// slot. The first and the latest tokens are read as exact rows instead of
// codes. `prompt_tokens` is the length of the prompt if slots were evicted,
// otherwise 0.
double CacheBytesRead(const cache::PageLayout& layout, int64_t length_tokens,
                      int64_t prompt_tokens = 0);

}  // namespace kvasir::bench
