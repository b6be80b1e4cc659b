// Decides which part of a key bias the cache leaves out, and which part stays
// in cached keys (kernels/latents/key_bias.h).
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "kernels/latents/key_bias.h"
#include "kernels/rowwise/rope.h"

namespace kvasir::worker {

// How RoPE rotates the first 2 * steps.size() numbers of each head, in pairs.
struct KeyTurns {
  // How much each pair's angle grows per position, as kernels::RopeStep returns
  // it. Empty if keys do not rotate.
  absl::Span<const uint64_t> steps;
  kernels::RopePairing pairing = kernels::RopePairing::kHalfSplit;
  float attention_factor = 1.0f;
};

struct KeyBiasSplit {
  int64_t tile_pairs = 0;
  int64_t exact_pairs = 0;
  std::vector<kernels::KeyBiasPair> pairs;  // [Hkv, tile_pairs + exact_pairs]
  std::vector<float> cached;  // [Hkv, D]: the part of the bias in cached keys
};

// Decides for each number of `bias` [Hkv, head_dim] where it goes:
// - Numbers that RoPE does not rotate are left out. They add the same to the
//   scores of all slots, and the softmax cancels that.
// - The four exact pairs of each head are left out. These are the pairs that
//   would otherwise leave the longest vectors in cached keys.
// - Other pairs that turn by at most 0.1 rad between the centre of a tile and
//   its ends are tile pairs. Cached keys have only the difference between the
//   bias as turned to the key's position and as turned to the tile's centre.
// - All other pairs stay in cached keys.
KeyBiasSplit SplitKeyBias(absl::Span<const float> bias, int64_t head_dim,
                          const KeyTurns& turns);

// Divides the biases by a unit and returns the unit, a power of two
// (KeyBiasParamsIn::unit). No bias is then longer than 1, so the numbers that
// key_bias computes of a query are not longer than the query.
float ScaleToUnits(std::vector<kernels::KeyBiasPair>* pairs);

}  // namespace kvasir::worker
