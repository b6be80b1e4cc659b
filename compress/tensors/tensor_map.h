#pragma once

#include <ATen/ATen.h>

#include <map>
#include <string>

namespace kvasir::compress {

// Tensors by name. Of one layer: names after "model.layers.{l}.", as
// "self_attn.k_proj.down.weight" (docs/artifact.md).
using TensorMap = std::map<std::string, at::Tensor, std::less<>>;

// Everything outside the layers: the embedding, the final norm, and the head,
// which is the embedding's own tensor when tied.
struct OuterTensors {
  at::Tensor embedding;        // [V, M]
  at::Tensor positions;        // [T, M]; undefined where none are learned
  at::Tensor final_norm;       // [M]
  at::Tensor final_norm_bias;  // [M]; undefined but for LayerNorm
  at::Tensor head;             // [V, M]
};

}  // namespace kvasir::compress
