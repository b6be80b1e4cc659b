// What a compression plan must know of a model: its attention's sizes. A plain
// struct, because plan/ does not link model/, which makes it
// (model/shapes/attention_shape.h).
#pragma once

#include <cstdint>
#include <vector>

namespace kvasir::plan {

enum class RopePairing {
  kHalfSplit,    // pair f is (f, f + rotary_dim/2): Llama, NeoX
  kInterleaved,  // pair f is (2f, 2f + 1)
};

struct LayerShape {
  // Keys that a query sees at most, itself included; 0: all before it.
  int64_t sliding_window = 0;
  // The layer rotates its keys (false: NoPE layers, learned positions, ALiBi).
  bool rope = true;
};

// Spaces, codecs and pages need the KV heads and RoPE's dims alone; tensors and
// programs all of it.
struct AttentionShape {
  int64_t num_kv_heads = 0;  // Hkv
  int64_t head_dim = 0;      // D
  // Leading dims of a head that RoPE rotates: even, <= head_dim; 0: none.
  int64_t rotary_dim = 0;
  // Keys are normalized per head after their projection.
  bool qk_norm = false;
  std::vector<LayerShape> layers;  // [L]
  int64_t num_heads = 0;           // Hq, which Hkv divides; 0: not told
  int64_t hidden_size = 0;         // M
  RopePairing pairing = RopePairing::kHalfSplit;
  bool qkv_bias = false;
  bool o_bias = false;

  int64_t num_layers() const { return static_cast<int64_t>(layers.size()); }
  // RoPE pairs of a key of the layer; 0: it does not rotate.
  int64_t num_pairs(int64_t layer) const {
    return layers[static_cast<size_t>(layer)].rope ? rotary_dim / 2 : 0;
  }
};

}  // namespace kvasir::plan
