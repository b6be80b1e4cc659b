// The sizes of a model's attention that a compression plan needs.
// model/shapes/attention_shape.h fills in these structs, because plan/ does not
// depend on model/.
#pragma once

#include <cstdint>
#include <vector>

namespace kvasir::plan {

enum class RopePairing {
  kHalfSplit,    // pair f: dimensions f and f + rotary_dim / 2 (Llama, NeoX)
  kInterleaved,  // pair f: dimensions 2f and 2f + 1
};

struct LayerShape {
  // The most keys that a query attends to, including the key of its own token.
  // 0: all keys up to its own.
  int64_t sliding_window = 0;
  // False if the layer does not rotate keys: NoPE, learned positions, ALiBi.
  bool rope = true;
};

// The shape of the attention of all layers. Code for spaces, codecs and pages
// uses only KV heads and RoPE's dimensions. Code for tensors and programs uses
// all fields.
struct AttentionShape {
  int64_t num_kv_heads = 0;  // Hkv
  int64_t head_dim = 0;      // D
  // RoPE rotates this many dimensions at the start of each head: an even
  // number, at most head_dim. 0: it rotates none.
  int64_t rotary_dim = 0;
  // True if the keys of each head are normalized after their projection.
  bool qk_norm = false;
  std::vector<LayerShape> layers;
  int64_t num_heads = 0;    // Hq, a multiple of Hkv; 0: unknown
  int64_t hidden_size = 0;  // M
  RopePairing pairing = RopePairing::kHalfSplit;
  bool qkv_bias = false;
  bool o_bias = false;

  int64_t num_layers() const { return static_cast<int64_t>(layers.size()); }
  // The number of RoPE pairs in a key of the layer. 0: the layer does not
  // rotate keys.
  int64_t num_pairs(int64_t layer) const {
    return layers[static_cast<size_t>(layer)].rope ? rotary_dim / 2 : 0;
  }
};

}  // namespace kvasir::plan
