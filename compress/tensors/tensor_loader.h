// Tensors of a checkpoint as libtorch tensors on the CPU.
//
// Errors: NotFound for a missing tensor and InvalidArgument for another type,
//   both with file and tensor; errors of reading the file.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <span>
#include <string_view>

#include "absl/status/statusor.h"
#include "compress/tensors/tensor_map.h"
#include "model/checkpoint/checkpoint.h"

namespace kvasir::compress {

// `type` must be the type of a weight (model::IsWeightType).
at::ScalarType ScalarTypeOf(model::TensorType type);

// A tensor of type F32, F16 or BF16, widened to float32, in its own shape.
absl::StatusOr<at::Tensor> LoadTensor(const model::Checkpoint& checkpoint,
                                      std::string_view name);

// A tensor in its stored type.
absl::StatusOr<at::Tensor> LoadStored(const model::Checkpoint& checkpoint,
                                      std::string_view name);
// Some rows of a matrix, widened to float32. Only these rows are read.
// OutOfRange for a row that the matrix does not have.
absl::StatusOr<at::Tensor> LoadRows(const model::Checkpoint& checkpoint,
                                    std::string_view name,
                                    std::span<const int32_t> rows);

// All tensors of one layer, by their names after "model.layers.{l}.", such as
// "self_attn.q_proj.weight". Tensors that no decoder reads (early Llama's
// rotary_emb.inv_freq, integer masks) are left out.
absl::StatusOr<TensorMap> LoadLayer(const model::Checkpoint& checkpoint,
                                    int64_t layer);

absl::StatusOr<OuterTensors> LoadOuterTensors(
    const model::Checkpoint& checkpoint);
// Loads only the final norm and learned positions, without embedding and head.
absl::Status LoadSmallOuter(const model::Checkpoint& checkpoint,
                            OuterTensors& outer);

}  // namespace kvasir::compress
