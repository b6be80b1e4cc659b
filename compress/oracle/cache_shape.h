#pragma once

#include "model/shapes/decoder_spec.h"
#include "plan/plan.h"

namespace kvasir::compress {

// What plans and layouts must know of a model.
inline cache::CacheShape CacheShapeOf(const model::DecoderSpec& spec) {
  cache::CacheShape shape;
  shape.num_kv_heads = spec.num_kv_heads;
  shape.head_dim = spec.head_dim;
  shape.rotary_dim = spec.rope.rotary_dim;
  for (const model::LayerSpec& layer : spec.layers) {
    shape.layers.push_back({layer.sliding_window, layer.rope});
  }
  return shape;
}

}  // namespace kvasir::compress
