// Cosines and sines of the angles by which the exact pairs of a key bias
// (kernels/latents/key_bias.h) turn within a tile. C++17.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention/params/paged_attention.h"
#include "kernels/simd/scalar_math.h"

namespace kvasir::kernels {

// Returns [Hkv, exact_pairs, 2, 64]. For each exact pair of each KV head, these
// are the cosines [64] and sines [64] of the angles by which it turns from the
// start of a tile to each of the tile's 64 positions.
inline std::vector<float> KeyBiasTurns(const AttentionKeyBias& bias,
                                       int64_t num_kv_heads) {
  const int64_t pairs = bias.tile_pairs + bias.exact_pairs;
  std::vector<float> turns;
  for (int64_t j = 0; j < num_kv_heads; ++j) {
    for (int64_t p = bias.tile_pairs; p < pairs; ++p) {
      const size_t at = turns.size();
      turns.resize(at + 2 * kKeyBiasTile);
      for (size_t i = 0; i < kKeyBiasTile; ++i) {
        const UnitVector turn = UnitVectorAt(bias.steps[j * pairs + p] * i);
        turns[at + i] = turn.cosine;
        turns[at + kKeyBiasTile + i] = turn.sine;
      }
    }
  }
  return turns;
}

}  // namespace kvasir::kernels
