#pragma once

#include <ATen/ATen.h>

#include "compress/tensors/tensor_map.h"

namespace kvasir::compress {

// The attention projections of one uncompressed layer, float32 on the CPU, as
// [out, in]. Biases are undefined if the model has none.
struct AttentionWeights {
  at::Tensor query;   // [Hq * D, M]
  at::Tensor key;     // [Hkv * D, M]
  at::Tensor value;   // [Hkv * D, M]
  at::Tensor output;  // [M, Hq * D]
  at::Tensor query_bias;
  at::Tensor key_bias;
  at::Tensor value_bias;
  at::Tensor output_bias;
};

}  // namespace kvasir::compress
