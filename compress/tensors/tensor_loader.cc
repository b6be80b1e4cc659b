#include "compress/tensors/tensor_loader.h"

#include <cstring>
#include <span>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "compress/runtime/torch_status.h"

namespace kvasir::compress {
namespace {

absl::StatusOr<at::ScalarType> WeightType(
    const model::TensorStore::Entry& tensor) {
  const model::TensorType type = tensor.info->type;
  if (model::IsWeightType(type)) return ScalarTypeOf(type);
  return absl::InvalidArgumentError(
      absl::StrCat(tensor.file->path(), ": tensor ", tensor.info->name,
                   ": the type must be F32, F16 or BF16, is ",
                   std::string(model::TensorTypeName(type))));
}

absl::StatusOr<at::Tensor> ReadStored(const model::TensorStore::Entry& entry) {
  KVASIR_ASSIGN_OR_RETURN(const at::ScalarType type, WeightType(entry));
  return CatchTorch([&]() -> absl::StatusOr<at::Tensor> {
    const at::NoGradGuard no_grad;
    const at::Tensor stored =
        at::empty(entry.info->shape, at::TensorOptions().dtype(type));
    const std::span<std::byte> bytes(static_cast<std::byte*>(stored.data_ptr()),
                                     static_cast<size_t>(stored.nbytes()));
    KVASIR_RETURN_IF_ERROR(entry.file->Read(*entry.info, 0, bytes));
    entry.file->Release(*entry.info, 0, entry.info->size_bytes);
    return stored;
  });
}

absl::StatusOr<at::Tensor> ReadTensor(const model::TensorStore::Entry& entry) {
  KVASIR_ASSIGN_OR_RETURN(const at::Tensor stored, ReadStored(entry));
  return CatchTorch([&]() -> absl::StatusOr<at::Tensor> {
    const at::NoGradGuard no_grad;
    return stored.to(at::kFloat);
  });
}

}  // namespace

at::ScalarType ScalarTypeOf(model::TensorType type) {
  switch (type) {
    case model::TensorType::kF32:
      return at::kFloat;
    case model::TensorType::kF16:
      return at::kHalf;
    default:
      return at::kBFloat16;
  }
}

absl::StatusOr<at::Tensor> LoadTensor(const model::Checkpoint& checkpoint,
                                      std::string_view name) {
  KVASIR_ASSIGN_OR_RETURN(const model::TensorStore::Entry entry,
                          checkpoint.Tensor(name));
  return ReadTensor(entry);
}

absl::StatusOr<at::Tensor> LoadStored(const model::Checkpoint& checkpoint,
                                      std::string_view name) {
  KVASIR_ASSIGN_OR_RETURN(const model::TensorStore::Entry entry,
                          checkpoint.Tensor(name));
  return ReadStored(entry);
}

absl::StatusOr<at::Tensor> LoadRows(const model::Checkpoint& checkpoint,
                                    std::string_view name,
                                    std::span<const int32_t> rows) {
  KVASIR_ASSIGN_OR_RETURN(const model::TensorStore::Entry entry,
                          checkpoint.Tensor(name));
  KVASIR_ASSIGN_OR_RETURN(const at::ScalarType type, WeightType(entry));
  const auto row_bytes = static_cast<uint64_t>(entry.info->row_bytes());
  return CatchTorch([&]() -> absl::StatusOr<at::Tensor> {
    const at::NoGradGuard no_grad;
    const at::Tensor stored =
        at::empty({static_cast<int64_t>(rows.size()), entry.info->shape[1]},
                  at::TensorOptions().dtype(type));
    auto* to = static_cast<std::byte*>(stored.data_ptr());
    for (const int32_t row : rows) {
      if (row < 0 || row >= entry.info->shape[0]) {
        return absl::OutOfRangeError(
            absl::StrCat(entry.file->path(), ": tensor ", entry.info->name,
                         ": row ", row, " was requested, but there are only ",
                         entry.info->shape[0], " rows"));
      }
      const std::span<std::byte> bytes(to, static_cast<size_t>(row_bytes));
      KVASIR_RETURN_IF_ERROR(entry.file->Read(
          *entry.info, static_cast<uint64_t>(row) * row_bytes, bytes));
      to += row_bytes;
    }
    return stored.to(at::kFloat);
  });
}

absl::StatusOr<TensorMap> LoadLayer(const model::Checkpoint& checkpoint,
                                    int64_t layer) {
  const std::string prefix = model::LayerTensorName(layer, "");
  const auto& entries = checkpoint.tensors().entries();
  TensorMap tensors;
  for (auto it = entries.lower_bound(prefix);
       it != entries.end() && absl::StartsWith(it->first, prefix); ++it) {
    if (absl::StrContains(it->first, ".rotary_emb.")) continue;
    if (!model::IsWeightType(it->second.info->type)) continue;
    KVASIR_ASSIGN_OR_RETURN(at::Tensor tensor, ReadTensor(it->second));
    tensors.emplace(it->first.substr(prefix.size()), std::move(tensor));
  }
  if (tensors.empty()) {
    return absl::NotFoundError(absl::StrCat(
        checkpoint.folder(), ": there are no tensors of layer ", layer));
  }
  return tensors;
}

absl::Status LoadSmallOuter(const model::Checkpoint& checkpoint,
                            OuterTensors& outer) {
  KVASIR_ASSIGN_OR_RETURN(outer.final_norm,
                          LoadTensor(checkpoint, model::kFinalNormName));
  if (checkpoint.spec().norm == model::NormKind::kLayerNorm) {
    KVASIR_ASSIGN_OR_RETURN(outer.final_norm_bias,
                            LoadTensor(checkpoint, model::kFinalNormBiasName));
  }
  if (checkpoint.spec().learned_positions) {
    KVASIR_ASSIGN_OR_RETURN(outer.positions,
                            LoadTensor(checkpoint, model::kPositionsName));
  }
  return absl::OkStatus();
}

absl::StatusOr<OuterTensors> LoadOuterTensors(
    const model::Checkpoint& checkpoint) {
  OuterTensors outer;
  KVASIR_ASSIGN_OR_RETURN(outer.embedding,
                          LoadTensor(checkpoint, model::kEmbeddingName));
  KVASIR_RETURN_IF_ERROR(LoadSmallOuter(checkpoint, outer));
  outer.head = outer.embedding;
  if (!checkpoint.spec().tied_head) {
    KVASIR_ASSIGN_OR_RETURN(outer.head,
                            LoadTensor(checkpoint, model::kHeadName));
  }
  return outer;
}

}  // namespace kvasir::compress
