#pragma once

#include "model/shapes/decoder_spec.h"
#include "plan/attention_shape.h"

namespace kvasir::model {

// The properties of a model that a compression plan needs.
inline plan::AttentionShape AttentionShapeOf(const DecoderSpec& spec) {
  plan::AttentionShape shape;
  shape.num_kv_heads = spec.num_kv_heads;
  shape.head_dim = spec.head_dim;
  shape.rotary_dim = spec.rope.rotary_dim;
  shape.num_heads = spec.num_heads;
  shape.hidden_size = spec.hidden_size;
  shape.pairing = spec.rope.pairing;
  shape.qk_norm = spec.qk_norm != QkNorm::kNone;
  shape.qkv_bias = spec.qkv_bias;
  shape.o_bias = spec.o_bias;
  for (const LayerSpec& layer : spec.layers) {
    shape.layers.push_back({.sliding_window = layer.sliding_window,
                            .rope = layer.rope && spec.rope.rotary_dim > 0});
  }
  return shape;
}

}  // namespace kvasir::model
