// The number types of a checkpoint's tensors, as a cache may hold them.
#pragma once

#include <optional>
#include <string_view>

#include "model/checkpoint/checkpoint.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::model {

// The type of a tensor; bf16 for types that a cache does not have. Empty if the
// checkpoint has no such tensor.
std::optional<kvasir::v1::DataType> TensorDataType(const Checkpoint& checkpoint,
                                                   std::string_view name);

// The type of the model's cache if nothing else names one: that of the
// projection that makes the keys of layer 0. A compressed checkpoint has none;
// then the embedding's type is used.
kvasir::v1::DataType OwnCacheType(const Checkpoint& checkpoint);

}  // namespace kvasir::model
