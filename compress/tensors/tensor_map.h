#pragma once

#include <ATen/ATen.h>

#include <map>
#include <string>

namespace kvasir::compress {

// Tensors by name. For the tensors of one layer, names are without the prefix
// "model.layers.{l}.", such as "self_attn.k_proj.down.weight"
// (docs/artifact.md).
using TensorMap = std::map<std::string, at::Tensor, std::less<>>;

// The tensors that belong to no layer: embedding, learned positions, final norm
// and head. A tied head is the same tensor as the embedding.
struct OuterTensors {
  at::Tensor embedding;        // [V, M]
  at::Tensor positions;        // [T, M]; undefined if positions are not learned
  at::Tensor final_norm;       // [M]
  at::Tensor final_norm_bias;  // [M]; defined only for LayerNorm
  at::Tensor head;             // [V, M]
};

}  // namespace kvasir::compress
