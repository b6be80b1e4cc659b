// Loads tensors of a checkpoint as libtorch tensors on the CPU.
//
// Errors: NotFound for a missing tensor and InvalidArgument for a wrong type,
//   both naming file and tensor; errors of reading the file.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <span>
#include <string_view>

#include "absl/status/statusor.h"
#include "compress/tensors/tensor_map.h"
#include "model/checkpoint/checkpoint.h"

namespace kvasir::compress {

// Returns the libtorch type for `type`, which must be the type of a weight
// (model::IsWeightType).
at::ScalarType ScalarTypeOf(model::TensorType type);

// Loads a tensor of type F32, F16 or BF16 and widens it to float32.
absl::StatusOr<at::Tensor> LoadTensor(const model::Checkpoint& checkpoint,
                                      std::string_view name);

// Loads a tensor in its stored type.
absl::StatusOr<at::Tensor> LoadStored(const model::Checkpoint& checkpoint,
                                      std::string_view name);
// Loads the given rows of a matrix, widened to float32. Only these rows are
// read. OutOfRange for a row that the matrix does not have.
absl::StatusOr<at::Tensor> LoadRows(const model::Checkpoint& checkpoint,
                                    std::string_view name,
                                    std::span<const int32_t> rows);

// Loads all tensors of one layer, by their names without the prefix
// "model.layers.{l}.", such as "self_attn.q_proj.weight". Tensors that no
// decoder reads (early Llama's rotary_emb.inv_freq, integer masks) are left
// out.
absl::StatusOr<TensorMap> LoadLayer(const model::Checkpoint& checkpoint,
                                    int64_t layer);

absl::StatusOr<OuterTensors> LoadOuterTensors(
    const model::Checkpoint& checkpoint);
// Loads the final norm and learned positions. Leaves out the large outer
// tensors: embedding and head.
absl::Status LoadSmallOuter(const model::Checkpoint& checkpoint,
                            OuterTensors& outer);

}  // namespace kvasir::compress
