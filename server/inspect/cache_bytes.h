// What the bytes of a cache are made of.
#pragma once

#include <cstdint>

#include "cache/layout/layout.h"

namespace kvasir::cli {

// T: int64_t at a length, double per token.
template <typename T>
struct CacheBytes {
  T key_codes = 0;  // those of key and value among them
  T value_codes = 0;
  T parameters = 0;    // scales and minima
  T annotations = 0;   // landmarks of a selection, slot metadata of eviction
  T padding = 0;       // of regions to their alignment
  T unfilled = 0;      // slots of the last page that hold no token yet
  T per_sequence = 0;  // side pages: basis, mean, exact rows

  T total() const {
    return key_codes + value_codes + parameters + annotations + padding +
           unfilled + per_sequence;
  }
};

// Of one more token; the total is layout.marginal_bytes_per_token().
CacheBytes<double> BytesOfToken(const cache::PageLayout& layout);

// Of a sequence of this length; the total is layout.BytesAtLength.
CacheBytes<int64_t> BytesOfSequence(const cache::PageLayout& layout,
                                    int64_t length_tokens,
                                    int64_t chunk_tokens);

}  // namespace kvasir::cli
