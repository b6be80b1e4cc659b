// Derives the number type of a KV cache from the types of a
// checkpoint's tensors.
#pragma once

#include <optional>
#include <string_view>

#include "model/checkpoint/checkpoint.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::model {

// Returns the number type of a tensor, or bf16 if a KV cache cannot store that
// type. Nullopt if the checkpoint has no tensor `name`.
std::optional<kvasir::v1::DataType> TensorDataType(const Checkpoint& checkpoint,
                                                   std::string_view name);

// The number type of the KV cache if neither a flag nor the plan sets it: the
// type of layer 0's key projection. A compressed checkpoint has no such
// projection; then the type of the embedding is used.
kvasir::v1::DataType OwnCacheType(const Checkpoint& checkpoint);

}  // namespace kvasir::model
