#include "model/checkpoint/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <set>
#include <string>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "model/checkpoint/family_tensors.h"
#include "model/checkpoint/gguf_tensors.h"
#include "model/files/file.h"
#include "model/gguf/gguf_header.h"
#include "model/gguf/gguf_model.h"

namespace kvasir::model {
namespace {

constexpr uint64_t kMaxPlanBytes = 64 << 20;

// If the read buffer has room for more rows than this, all blocks except the
// last have a multiple of this number of rows.
constexpr int64_t kRowMultiple = 32;

// If the name of a tensor that the model does not need contains one of these
// texts, the model computes something that its config.json does not state.
constexpr std::string_view kUnsupportedParts[] = {
    ".q_norm.",
    ".k_norm.",
    ".block_sparse_moe.",
    ".experts.",
    ".pre_feedforward_layernorm.",
    ".post_feedforward_layernorm.",
};

// True if this side is cached at full rank and not as codes. Then its
// projection is that of the base model.
bool IsPlain(const plan::ResolvedSide& side) {
  return side.parts.size() == 1 && side.parts[0].space == plan::Space::kFull &&
         side.parts[0].bits.empty() && !side.parts[0].has_basis();
}

// Returns the layer of an attention projection's tensor, or nullopt for
// other tensors.
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

TensorRange TensorRange::All(const TensorInfo& tensor) {
  return {.num_rows = tensor.num_rows(),
          .row_bytes = static_cast<int64_t>(tensor.row_bytes())};
}

TensorStream::TensorStream(const TensorStore::Entry& tensor,
                           std::span<std::byte> buffer)
    : TensorStream(tensor, TensorRange::All(*tensor.info), buffer) {}

TensorStream::TensorStream(const TensorStore::Entry& tensor,
                           const TensorRange& range,
                           std::span<std::byte> buffer)
    : tensor_(tensor),
      range_(range),
      buffer_(buffer),
      hasher_(static_cast<uint64_t>(range.row_bytes)) {
  const TensorRange all = TensorRange::All(info());
  KVASIR_CHECK(range.first_row >= 0 && range.num_rows >= 0 &&
               range.num_rows <= all.num_rows - range.first_row);
  KVASIR_CHECK(range.first_byte >= 0 && range.row_bytes >= 0 &&
               range.row_bytes <= all.row_bytes - range.first_byte);
  WillNeed(0, RowsOfBlock(0));
}

bool TensorStream::whole_rows() const {
  return range_.row_bytes == TensorRange::All(info()).row_bytes;
}

int64_t TensorStream::RowsOfBlock(int64_t first_row) const {
  if (range_.row_bytes == 0) return 0;
  int64_t rows = static_cast<int64_t>(buffer_.size()) / range_.row_bytes;
  // Rounds down to whole panels of rows if the buffer holds more than one,
  // because the matrix multiplication packs whole panels fastest.
  if (rows > kRowMultiple) rows -= rows % kRowMultiple;
  return std::min(rows, range_.num_rows - first_row);
}

void TensorStream::WillNeed(int64_t first_row, int64_t num_rows) const {
  const auto row_bytes = static_cast<int64_t>(info().row_bytes());
  const int64_t first = range_.first_row + first_row;
  const auto need = [&](int64_t begin, int64_t bytes) {
    tensor_.file->WillNeed(info(), static_cast<uint64_t>(begin),
                           static_cast<uint64_t>(bytes));
  };
  if (whole_rows()) {
    if (num_rows > 0) need(first * row_bytes, num_rows * row_bytes);
    return;
  }
  for (int64_t row = first; row < first + num_rows; ++row) {
    need(row * row_bytes + range_.first_byte, range_.row_bytes);
  }
}

absl::Status TensorStream::Read(int64_t first_row, std::span<std::byte> out) {
  const uint64_t row_bytes = info().row_bytes();
  const uint64_t begin =
      static_cast<uint64_t>(range_.first_row + first_row) * row_bytes;
  read_bytes_ += static_cast<int64_t>(out.size());
  if (whole_rows()) {
    KVASIR_RETURN_IF_ERROR(tensor_.file->Read(info(), begin, out));
    tensor_.file->Release(info(), begin, out.size());
    return absl::OkStatus();
  }
  // Does not release these bytes from the page cache, because other ranks need
  // the other parts of the same rows.
  const auto part_bytes = static_cast<size_t>(range_.row_bytes);
  for (size_t row = 0; row < out.size() / part_bytes; ++row) {
    KVASIR_RETURN_IF_ERROR(tensor_.file->Read(
        info(),
        begin + row * row_bytes + static_cast<uint64_t>(range_.first_byte),
        out.subspan(row * part_bytes, part_bytes)));
  }
  return absl::OkStatus();
}

absl::StatusOr<TensorStream::Block> TensorStream::Next() {
  const int64_t rows_left = range_.num_rows - next_row_;
  const int64_t first_row = range_.first_row + next_row_;
  if (rows_left == 0 || range_.row_bytes == 0) return Block{first_row, 0, {}};
  Block block;
  block.first_row = first_row;
  block.num_rows = RowsOfBlock(next_row_);
  if (block.num_rows == 0) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "%s: tensor %s: a row has %d bytes, but the read buffer "
        "has only %d",
        tensor_.file->path(), info().name, range_.row_bytes, buffer_.size()));
  }
  const int64_t next = next_row_ + block.num_rows;
  WillNeed(next, RowsOfBlock(next));
  const std::span<std::byte> out = buffer_.subspan(
      0, static_cast<size_t>(block.num_rows * range_.row_bytes));
  KVASIR_RETURN_IF_ERROR(Read(next_row_, out));
  hasher_.Add(out);
  next_row_ = next;
  block.bytes = out;
  return block;
}

absl::StatusOr<Checkpoint> Checkpoint::OpenGguf(const std::string& path) {
  KVASIR_ASSIGN_OR_RETURN(DecoderSpec spec, LoadModelConfig(path));
  KVASIR_ASSIGN_OR_RETURN(TensorStore store, OpenGgufTensors(path, spec));
  Checkpoint checkpoint(path, std::move(spec), std::move(store));
  checkpoint.is_gguf_ = true;
  KVASIR_RETURN_IF_ERROR(checkpoint.CheckPlainTensors(/*attention=*/true));
  // GGUF metadata does not say which biases the model has. A tensor that is
  // not needed, such as the bias of a norm, would change the results, so it
  // is refused.
  std::set<std::string> names;
  for (const RequiredTensor& want : RequiredTensors(checkpoint.spec())) {
    names.insert(want.name);
  }
  for (const auto& [name, entry] : checkpoint.store_.entries()) {
    if (names.contains(name)) continue;
    return absl::UnimplementedError(absl::StrFormat(
        "%s: tensor %s: the model needs a computation that this engine does "
        "not support",
        path, entry.info->name));
  }
  return checkpoint;
}

absl::StatusOr<Checkpoint> Checkpoint::Open(const std::string& folder) {
  if (MayBeGguf(folder)) return OpenGguf(folder);
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error)) {
    return absl::NotFoundError(
        std::filesystem::exists(folder, error)
            ? absl::StrFormat("%s is not a folder; give the folder of a model",
                              folder)
            : absl::StrFormat("there is no model folder or GGUF file %s",
                              folder));
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
  // A GGUF file has the name by which it was opened. Links are not followed,
  // because they often lead to a file with a meaningless name.
  if (is_gguf_) {
    return std::string(
        WithoutSplitNumber(std::filesystem::path(folder_).stem().string()));
  }
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
                        is_gguf_ ? GgufNameOf(spec(), name)
                                 : StoredTensorOf(spec(), name).name));
  }
  if (!IsWeightType(entry->info->type)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: tensor %s has the type %s, but must have F32, F16 or BF16",
        entry->file->path(), entry->info->name,
        TensorTypeName(entry->info->type)));
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
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: tensor %s has the type %s, but must have F32", have.file->path(),
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
        absl::StrFormat(
            "layer %d: %s; the plan needs the shape %s: were these weights "
            "made for another plan?",
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
      return absl::InvalidArgumentError(
          absl::StrFormat("layer %d: %s: tensor %s is not used by the plan: "
                          "were these weights made for another plan?",
                          *layer, entry.file->path(), entry.info->name));
    }
    if (absl::EndsWith(name, ".bias")) {
      return absl::InvalidArgumentError(
          absl::StrFormat("layer %d: %s: tensor %s is a bias, but config.json "
                          "says that its projection has no bias",
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
  std::set<std::string_view> names;
  for (const RequiredTensor& want : wanted) names.insert(want.name);
  for (const auto& [name, entry] : store_.entries()) {
    for (const std::string_view part : kUnsupportedParts) {
      if (name.find(part) != name.npos && !names.contains(name)) {
        return absl::UnimplementedError(absl::StrFormat(
            "%s: tensor %s: the architecture %s has no such tensor, so the "
            "model needs a computation that this engine does not support",
            entry.file->path(), name, spec().architecture));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace kvasir::model
