// Tensors of a checkpoint as libtorch tensors on the CPU.
//
// Errors: NotFound for a missing tensor, InvalidArgument for another type, both
//   with file and tensor; what reading the file says.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <span>
#include <string_view>

#include "absl/status/statusor.h"
#include "compress/tensors/tensor_map.h"
#include "model/checkpoint/checkpoint.h"

namespace kvasir::compress {

// Of a weight (model::IsWeightType).
at::ScalarType ScalarTypeOf(model::TensorType type);

// F32, F16 and BF16 tensors widened to float32, in their own shape.
absl::StatusOr<at::Tensor> LoadTensor(const model::Checkpoint& checkpoint,
                                      std::string_view name);

// In the type it is stored in.
absl::StatusOr<at::Tensor> LoadStored(const model::Checkpoint& checkpoint,
                                      std::string_view name);
// Some rows of a matrix, widened to float32; only they are read. OutOfRange for
// a row that it has not.
absl::StatusOr<at::Tensor> LoadRows(const model::Checkpoint& checkpoint,
                                    std::string_view name,
                                    std::span<const int32_t> rows);

// All tensors of one layer, by their names after "model.layers.{l}.", as
// "self_attn.q_proj.weight". Tensors that no decoder reads (early Llama's
// rotary_emb.inv_freq, masks of integers) are left out.
absl::StatusOr<TensorMap> LoadLayer(const model::Checkpoint& checkpoint,
                                    int64_t layer);

absl::StatusOr<OuterTensors> LoadOuterTensors(
    const model::Checkpoint& checkpoint);
// The same without embedding and head: the final norm and learned positions.
absl::Status LoadSmallOuter(const model::Checkpoint& checkpoint,
                            OuterTensors& outer);

}  // namespace kvasir::compress
