// Divides the bytes of a KV cache by their purpose.
#pragma once

#include <cstdint>

#include "cache/layout/layout.h"

namespace kvasir::cli {

// Bytes by purpose. T is int64_t for a whole sequence, and double for
// one token.
template <typename T>
struct CacheBytes {
  T key_codes = 0;  // includes codes that serve both key and value
  T value_codes = 0;
  T parameters = 0;  // scales and minima of codes
  T annotations =
      0;  // landmarks for page selection, and slot metadata for eviction
  T padding = 0;       // padding of regions to their alignment
  T unfilled = 0;      // slots in the last page that hold no token
  T per_sequence = 0;  // data kept once per sequence: basis, mean, exact rows

  T total() const {
    return key_codes + value_codes + parameters + annotations + padding +
           unfilled + per_sequence;
  }
};

// Returns the bytes that one more token takes. Their total is
// layout.marginal_bytes_per_token().
CacheBytes<double> BytesOfToken(const cache::PageLayout& layout);

// Returns the bytes of a sequence of this length. Their total is
// layout.BytesAtLength.
CacheBytes<int64_t> BytesOfSequence(const cache::PageLayout& layout,
                                    int64_t length_tokens,
                                    int64_t chunk_tokens);

}  // namespace kvasir::cli
