// Decides which part of a key bias, or of the mean of keys, the cache leaves
// out, and which part stays in cached keys (kernels/latents/key_bias.h).
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "kernels/latents/key_bias.h"
#include "kernels/rowwise/rope.h"

namespace kvasir::worker {

// How RoPE rotates the first 2 * steps.size() dimensions of each head,
// in pairs.
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

// Decides for each dimension of `bias` [Hkv, head_dim] whether cached keys
// include its bias:
// - Dimensions that RoPE does not rotate are left out. Their bias adds the same
//   amount to the scores of all slots, which the softmax cancels.
// - The exact pairs of each head, at most four, are left out. These are the
//   pairs whose bias would make cached keys longest.
// - Other pairs that turn by at most 0.1 rad between the centre of a tile and
//   its ends are tile pairs. Cached keys have only the difference between the
//   bias as turned to the key's position and as turned to the tile's centre.
// - All other pairs stay in cached keys.
KeyBiasSplit SplitKeyBias(absl::Span<const float> bias, int64_t head_dim,
                          const KeyTurns& turns);

// Divides all biases by one power of two and returns it
// (KeyBiasParamsIn::unit). The bias of a pair is then a vector of length at
// most 1, so its products with a query's pair (u and v in
// kernels/latents/key_bias.h) are at most as large as the length of that pair.
// Larger products might not fit float16.
float ScaleToUnits(std::vector<kernels::KeyBiasPair>* pairs);

}  // namespace kvasir::worker
