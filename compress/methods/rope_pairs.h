#pragma once

#include <cstdint>

#include "model/shapes/decoder_spec.h"

namespace kvasir::compress {

// Returns the number of RoPE pairs of a head in this layer.
inline int64_t NumRopePairs(const model::DecoderSpec& spec, int64_t layer) {
  const bool rotates = spec.layers[static_cast<size_t>(layer)].rope;
  return rotates ? spec.rope.rotary_dim / 2 : 0;
}

// The two dims of a head that RoPE rotates together.
struct PairDims {
  int64_t first = 0;
  int64_t second = 0;
};
inline PairDims DimsOfPair(const model::RopeSpec& rope, int64_t pair) {
  if (rope.pairing == model::RopePairing::kInterleaved) {
    return {2 * pair, 2 * pair + 1};
  }
  return {pair, pair + rope.rotary_dim / 2};
}

}  // namespace kvasir::compress
