#include "model/checkpoint/cache_type.h"

#include <string>

#include "model/checkpoint/plan_tensors.h"

namespace kvasir::model {

std::optional<kvasir::v1::DataType> TensorDataType(const Checkpoint& checkpoint,
                                                   std::string_view name) {
  const auto tensor = checkpoint.Tensor(name);
  if (!tensor.ok()) return std::nullopt;
  switch (tensor->info->type) {
    case TensorType::kF32:
      return kvasir::v1::F32;
    case TensorType::kF16:
      return kvasir::v1::F16;
    default:
      return kvasir::v1::BF16;
  }
}

kvasir::v1::DataType OwnCacheType(const Checkpoint& checkpoint) {
  for (const std::string& name : {LayerTensorName(0, "self_attn.k_proj.weight"),
                                  std::string(kEmbeddingName)}) {
    const auto type = TensorDataType(checkpoint, name);
    if (type.has_value()) return *type;
  }
  return kvasir::v1::BF16;
}

}  // namespace kvasir::model
