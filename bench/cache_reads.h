// Computes the bytes of the cache that a decode step reads, from the layout of
// its pages.
#pragma once

#include <cstdint>

#include "cache/layout/layout.h"

namespace kvasir::bench {

// Returns how many bytes of the cache attention reads for the last token of a
// sequence of `length_tokens` tokens, this token's own included. A sliding
// window limits the tokens that are read. If the plan keeps the first or the
// latest tokens exact, their exact rows are read; all other tokens are read as
// codes. `prompt_tokens` is the prompt's length if tokens were evicted,
// otherwise 0.
double CacheBytesRead(const cache::PageLayout& layout, int64_t length_tokens,
                      int64_t prompt_tokens = 0);

}  // namespace kvasir::bench
