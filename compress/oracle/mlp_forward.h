// The MLP or the experts of a decoder layer, which no plan changes. The
// function depends only on its arguments and is differentiable in every tensor.
// It may throw c10::Error, which callers catch with CatchTorch. Threads: any
// number.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

#include "absl/status/statusor.h"
#include "compress/tensors/tensor_map.h"
#include "model/shapes/decoder_spec.h"

namespace kvasir::compress {

// Applies the MLP or the experts (model::ExpertsSpec) of layer `layer` to x
// [B, T, M]. `tensors` are those of the layer, by the names of
// model::NormAndMlpTensors. INVALID_ARGUMENT for a missing tensor.
absl::StatusOr<at::Tensor> MlpForward(const model::DecoderSpec& spec,
                                      int64_t layer, const TensorMap& tensors,
                                      const at::Tensor& x);

}  // namespace kvasir::compress
