// Decides which part of a key bias the cache leaves out, and which part stays
// in cached keys (kernels/latents/key_bias.h).
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "kernels/latents/key_bias.h"
#include "kernels/rowwise/rope.h"

namespace kvasir::worker {

// How RoPE rotates the first numbers of each head.
struct KeyTurns {
  // The angle of each pair per position, as kernels::RopeStep returns it; empty
  // if keys do not rotate.
  absl::Span<const uint64_t> steps;
  kernels::RopePairing pairing = kernels::RopePairing::kHalfSplit;
  float attention_factor = 1.0f;
};

struct KeyBiasSplit {
  int64_t tile_pairs = 0;
  int64_t exact_pairs = 0;
  std::vector<kernels::KeyBiasPair> pairs;  // [Hkv, tile_pairs + exact_pairs]
  std::vector<float> cached;                // [Hkv, D]: what keys keep
};

// `bias` is [Hkv, head_dim].
// - Numbers that RoPE does not rotate are left out. They add the same to the
//   scores of all slots, which the softmax cancels.
// - Pairs that turn by at most 0.1 rad from the centre of a tile to its ends
// are
//   left out as tile pairs. The cache then has only what they have turned.
// - The four pairs of each head that would add the longest vectors to cached
//   keys even so are left out as exact pairs.
KeyBiasSplit SplitKeyBias(absl::Span<const float> bias, int64_t head_dim,
                          const KeyTurns& turns);

// Divides the biases by a unit and returns the unit, a power of two
// (KeyBiasParamsIn::unit). No bias is then longer than 1, so the numbers that
// key_bias computes of a query are not longer than the query.
float ScaleToUnits(std::vector<kernels::KeyBiasPair>* pairs);

}  // namespace kvasir::worker
