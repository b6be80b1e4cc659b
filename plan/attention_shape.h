// The sizes of a model's attention, as a compression plan needs them. This is a
// plain struct because plan/ does not link model/, which fills it in
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
  // The most keys that a query sees, itself included. 0: all keys before it.
  int64_t sliding_window = 0;
  // Whether the layer rotates its keys. False for NoPE layers, learned
  // positions and ALiBi.
  bool rope = true;
};

// Spaces, codecs and pages need only the KV heads and the dims of RoPE. Tensors
// and programs need all fields.
struct AttentionShape {
  int64_t num_kv_heads = 0;  // Hkv
  int64_t head_dim = 0;      // D
  // The leading dims of a head that RoPE rotates: even and <= head_dim. 0:
  // none.
  int64_t rotary_dim = 0;
  // Keys are normalized per head after their projection.
  bool qk_norm = false;
  std::vector<LayerShape> layers;  // [L]
  int64_t num_heads = 0;           // Hq, which Hkv divides; 0: unknown
  int64_t hidden_size = 0;         // M
  RopePairing pairing = RopePairing::kHalfSplit;
  bool qkv_bias = false;
  bool o_bias = false;

  int64_t num_layers() const { return static_cast<int64_t>(layers.size()); }
  // RoPE pairs of a key of the layer. 0: the layer does not rotate.
  int64_t num_pairs(int64_t layer) const {
    return layers[static_cast<size_t>(layer)].rope ? rotary_dim / 2 : 0;
  }
};

}  // namespace kvasir::plan
