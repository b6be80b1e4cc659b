#pragma once

#include <ATen/ATen.h>

#include <map>
#include <string>

namespace kvasir::compress {

// Tensors by name. Of one layer: names after "model.layers.{l}.", as
// "self_attn.k_proj.down.weight" (docs/artifact.md).
using TensorMap = std::map<std::string, at::Tensor, std::less<>>;

}  // namespace kvasir::compress
