#include "model/checkpoint/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <set>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "model/checkpoint/family_tensors.h"
#include "model/checkpoint/file.h"

namespace kvasir::model {
namespace {

constexpr uint64_t kMaxPlanBytes = 64 << 20;

// Blocks begin at multiples of it, where the buffer allows.
constexpr int64_t kRowMultiple = 32;

// Tensors that say the model computes more than its config told us.
constexpr std::string_view kTellingParts[] = {
    ".q_norm.",
    ".k_norm.",
    ".block_sparse_moe.",
    ".experts.",
    ".pre_feedforward_layernorm.",
    ".post_feedforward_layernorm.",
};

// Whole keys or values in a number type: the tensors of the base model.
bool IsPlain(const plan::ResolvedSide& side) {
  return side.parts.size() == 1 && side.parts[0].space == plan::Space::kFull &&
         side.parts[0].bits.empty() && !side.parts[0].has_basis();
}

// Layer of an attention projection's tensor.
std::optional<int64_t> AttentionLayer(absl::string_view name) {
  if (!absl::ConsumePrefix(&name, "model.layers.")) return std::nullopt;
  const size_t point = name.find('.');
  int64_t layer = 0;
  if (point == name.npos || !absl::SimpleAtoi(name.substr(0, point), &layer)) {
    return std::nullopt;
  }
  name.remove_prefix(point);
  if (!absl::ConsumePrefix(&name, ".self_attn.")) return std::nullopt;
  for (const absl::string_view projection :
       {"q_proj.", "k_proj.", "v_proj.", "o_proj."}) {
    if (absl::StartsWith(name, projection)) return layer;
  }
  return std::nullopt;
}

}  // namespace

TensorStream::TensorStream(const TensorStore::Entry& tensor,
                           std::span<std::byte> buffer)
    : tensor_(tensor), buffer_(buffer), hasher_(tensor.info->row_bytes()) {
  tensor_.file->WillNeed(
      *tensor_.info, 0,
      std::min<uint64_t>(buffer_.size(), tensor_.info->size_bytes));
}

absl::StatusOr<TensorStream::Block> TensorStream::Next() {
  const TensorInfo& tensor = info();
  const uint64_t row_bytes = tensor.row_bytes();
  const int64_t rows_left = tensor.num_rows() - next_row_;
  if (rows_left == 0 || row_bytes == 0) return Block{next_row_, 0, {}};
  if (buffer_.size() < row_bytes) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "%s: tensor %s: a row has %d bytes, the read buffer %d",
        tensor_.file->path(), tensor.name, row_bytes, buffer_.size()));
  }
  Block block;
  block.first_row = next_row_;
  block.num_rows = static_cast<int64_t>(buffer_.size() / row_bytes);
  // Whole panels where the buffer holds one: packing them is fastest.
  if (block.num_rows > kRowMultiple) {
    block.num_rows -= block.num_rows % kRowMultiple;
  }
  block.num_rows = std::min(rows_left, block.num_rows);
  const uint64_t offset = static_cast<uint64_t>(next_row_) * row_bytes;
  const uint64_t size = static_cast<uint64_t>(block.num_rows) * row_bytes;
  tensor_.file->WillNeed(
      tensor, offset + size,
      std::min<uint64_t>(size, tensor.size_bytes - offset - size));
  const std::span<std::byte> out = buffer_.subspan(0, size);
  KVASIR_RETURN_IF_ERROR(tensor_.file->Read(tensor, offset, out));
  tensor_.file->Release(tensor, offset, size);
  hasher_.Add(out);
  next_row_ += block.num_rows;
  block.bytes = out;
  return block;
}

absl::StatusOr<Checkpoint> Checkpoint::Open(const std::string& folder) {
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error)) {
    return absl::NotFoundError(
        std::filesystem::exists(folder, error)
            ? absl::StrFormat("%s: is no folder, want one of a model", folder)
            : absl::StrFormat("no such model folder: %s", folder));
  }
  KVASIR_ASSIGN_OR_RETURN(DecoderSpec spec, LoadModelConfig(folder));
  KVASIR_ASSIGN_OR_RETURN(TensorStore store, TensorStore::Open(folder));
  KVASIR_RETURN_IF_ERROR(UseOurNames(spec, &store));
  Checkpoint checkpoint(folder, std::move(spec), std::move(store));
  const std::string plan_path = absl::StrCat(folder, "/kv_plan.json");
  if (FileExists(plan_path)) {
    KVASIR_ASSIGN_OR_RETURN(checkpoint.kv_plan_json_,
                            ReadSmallFile(plan_path, kMaxPlanBytes));
  }
  KVASIR_RETURN_IF_ERROR(checkpoint.CheckPlainTensors(
      /*attention=*/!checkpoint.kv_plan_json_.has_value()));
  return checkpoint;
}

std::string Checkpoint::name() const {
  std::error_code error;
  const std::filesystem::path path =
      std::filesystem::weakly_canonical(folder_, error);
  if (error || path.filename().empty()) return folder_;
  return path.filename().string();
}

absl::StatusOr<TensorStore::Entry> Checkpoint::Tensor(
    std::string_view name) const {
  const TensorStore::Entry* entry = store_.Find(name);
  if (entry == nullptr) {
    return absl::NotFoundError(
        absl::StrFormat("%s: tensor %s is missing", folder_,
                        StoredTensorOf(spec(), name).name));
  }
  if (!IsWeightType(entry->info->type)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: tensor %s: want F32, F16 or BF16, have %s", entry->file->path(),
        entry->info->name, TensorTypeName(entry->info->type)));
  }
  return *entry;
}

absl::Status Checkpoint::CheckTensor(const RequiredTensor& want) const {
  KVASIR_ASSIGN_OR_RETURN(const TensorStore::Entry have, Tensor(want.name));
  if (have.info->shape != want.shape) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: tensor %s: want shape %s, have %s", have.file->path(),
        have.info->name, ShapeText(want.shape), ShapeText(have.info->shape)));
  }
  if (want.f32_only && have.info->type != TensorType::kF32) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: tensor %s: want F32, have %s", have.file->path(),
                        have.info->name, TensorTypeName(have.info->type)));
  }
  return absl::OkStatus();
}

absl::Status Checkpoint::CheckTensors(const plan::ResolvedPlan& plan,
                                      bool with_ranges) const {
  KVASIR_ASSIGN_OR_RETURN(const std::vector<RequiredTensor> wanted,
                          RequiredTensors(spec(), plan));
  for (const RequiredTensor& want : wanted) {
    if (want.f32_only && !with_ranges) continue;
    const absl::Status status = CheckTensor(want);
    if (status.ok()) continue;
    const std::optional<int64_t> layer = AttentionLayer(want.name);
    if (!layer.has_value()) return status;
    return absl::Status(
        status.code(),
        absl::StrFormat("layer %d: %s; the plan asks for shape %s: are these "
                        "its weights?",
                        *layer, status.message(), ShapeText(want.shape)));
  }
  std::vector<bool> compressed;
  for (int64_t layer = 0; layer < plan.num_layers(); ++layer) {
    const plan::ResolvedAttention& attention = plan.attention_of(layer);
    compressed.push_back(!IsPlain(attention.key) || !IsPlain(attention.value));
  }
  return CheckNoOthers(wanted, compressed);
}

absl::Status Checkpoint::CheckNoOthers(
    const std::vector<RequiredTensor>& wanted,
    const std::vector<bool>& compressed) const {
  std::set<std::string_view> names;
  for (const RequiredTensor& want : wanted) names.insert(want.name);
  for (const auto& [name, entry] : store_.entries()) {
    const std::optional<int64_t> layer = AttentionLayer(name);
    if (!layer.has_value() || *layer >= spec().num_layers() ||
        names.contains(name)) {
      continue;
    }
    if (compressed[static_cast<size_t>(*layer)]) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "layer %d: %s: tensor %s: the plan has no use for it: are these its "
          "weights?",
          *layer, entry.file->path(), entry.info->name));
    }
    if (absl::EndsWith(name, ".bias")) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "layer %d: %s: tensor %s: config.json says that this projection has "
          "no bias",
          *layer, entry.file->path(), entry.info->name));
    }
  }
  return absl::OkStatus();
}

absl::Status Checkpoint::CheckPlainTensors(bool attention) const {
  const std::vector<RequiredTensor> wanted = RequiredTensors(spec());
  for (const RequiredTensor& want : wanted) {
    if (attention || !AttentionLayer(want.name).has_value()) {
      KVASIR_RETURN_IF_ERROR(CheckTensor(want));
    }
  }
  if (attention) {
    const std::vector<bool> compressed(static_cast<size_t>(spec().num_layers()),
                                       false);
    KVASIR_RETURN_IF_ERROR(CheckNoOthers(wanted, compressed));
  }
  for (const auto& [name, entry] : store_.entries()) {
    for (const std::string_view part : kTellingParts) {
      if (name.find(part) != name.npos) {
        return absl::UnimplementedError(absl::StrFormat(
            "%s: tensor %s: %s does not have it: the model computes more than "
            "this engine would",
            entry.file->path(), name, spec().architecture));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace kvasir::model
