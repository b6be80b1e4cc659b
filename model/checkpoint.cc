#include "model/checkpoint.h"

// The x86 header chooses the widest instruction set at run time.
#if defined(__x86_64__)
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "model/file.h"

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

}  // namespace

std::string LayerTensorName(int64_t layer, std::string_view part) {
  return absl::StrFormat("model.layers.%d.%s", layer, part);
}

std::vector<RequiredTensor> RequiredTensors(const DecoderSpec& spec) {
  const int64_t m = spec.hidden_size;
  const int64_t f = spec.intermediate_size;
  const int64_t q = spec.num_heads * spec.head_dim;
  const int64_t kv = spec.num_kv_heads * spec.head_dim;
  std::vector<RequiredTensor> tensors;
  tensors.push_back({std::string(kEmbeddingName), {spec.vocab_size, m}});
  for (int64_t layer = 0; layer < spec.num_layers(); ++layer) {
    const auto add = [&](std::string_view part, std::vector<int64_t> shape) {
      tensors.push_back({LayerTensorName(layer, part), std::move(shape)});
    };
    add("input_layernorm.weight", {m});
    add("self_attn.q_proj.weight", {q, m});
    add("self_attn.k_proj.weight", {kv, m});
    add("self_attn.v_proj.weight", {kv, m});
    if (spec.qkv_bias) {
      add("self_attn.q_proj.bias", {q});
      add("self_attn.k_proj.bias", {kv});
      add("self_attn.v_proj.bias", {kv});
    }
    add("self_attn.o_proj.weight", {m, q});
    if (spec.o_bias) add("self_attn.o_proj.bias", {m});
    add("post_attention_layernorm.weight", {m});
    add("mlp.gate_proj.weight", {f, m});
    add("mlp.up_proj.weight", {f, m});
    add("mlp.down_proj.weight", {m, f});
    if (spec.mlp_bias) {
      add("mlp.gate_proj.bias", {f});
      add("mlp.up_proj.bias", {f});
      add("mlp.down_proj.bias", {m});
    }
  }
  tensors.push_back({std::string(kFinalNormName), {m}});
  if (!spec.tied_head) {
    tensors.push_back({std::string(kHeadName), {spec.vocab_size, m}});
  }
  return tensors;
}

std::string FingerprintText(const Fingerprint& fingerprint) {
  return absl::StrFormat("%016x%016x", fingerprint.high, fingerprint.low);
}

struct TensorStream::HashState {
  HashState() : state(XXH3_createState()) { XXH3_128bits_reset(state); }
  ~HashState() { XXH3_freeState(state); }
  HashState(const HashState&) = delete;
  HashState& operator=(const HashState&) = delete;
  XXH3_state_t* state;
};

TensorStream::TensorStream(const TensorStore::Entry& tensor,
                           std::span<std::byte> buffer)
    : tensor_(tensor), buffer_(buffer), hash_(std::make_unique<HashState>()) {
  tensor_.file->WillNeed(
      *tensor_.info, 0,
      std::min<uint64_t>(buffer_.size(), tensor_.info->size_bytes));
}

TensorStream::~TensorStream() = default;

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
  XXH3_128bits_update(hash_->state, out.data(), out.size());
  next_row_ += block.num_rows;
  block.bytes = out;
  return block;
}

Fingerprint TensorStream::fingerprint() const {
  const XXH128_hash_t hash = XXH3_128bits_digest(hash_->state);
  return Fingerprint{hash.high64, hash.low64};
}

void WeightsIdBuilder::Add(const TensorInfo& info,
                           const Fingerprint& fingerprint) {
  lines_.push_back(
      absl::StrFormat("%s %s %s %s", info.name, TensorTypeName(info.type),
                      ShapeText(info.shape), FingerprintText(fingerprint)));
}

std::string WeightsIdBuilder::Finish(const DecoderSpec& spec) {
  std::sort(lines_.begin(), lines_.end());
  std::string text = absl::StrJoin(lines_, "\n");
  absl::StrAppendFormat(&text, "\n%s heads %d/%d x %d eps %a",
                        spec.architecture, spec.num_heads, spec.num_kv_heads,
                        spec.head_dim, spec.norm_eps);
  absl::StrAppendFormat(&text, " rope %d %d %a", spec.rope.rotary_dim,
                        static_cast<int>(spec.rope.pairing),
                        spec.rope.attention_factor);
  for (const double frequency : spec.rope.frequencies) {
    absl::StrAppendFormat(&text, " %a", frequency);
  }
  for (const LayerSpec& layer : spec.layers) {
    absl::StrAppendFormat(&text, " window %d", layer.sliding_window);
  }
  const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  return FingerprintText({hash.high64, hash.low64});
}

absl::StatusOr<Checkpoint> Checkpoint::Open(const std::string& folder) {
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error)) {
    return absl::NotFoundError(
        absl::StrFormat("no such model folder: %s", folder));
  }
  KVASIR_ASSIGN_OR_RETURN(ModelConfig config, LoadModelConfig(folder));
  KVASIR_ASSIGN_OR_RETURN(TensorStore store, TensorStore::Open(folder));
  Checkpoint checkpoint(folder, std::move(config), std::move(store));
  KVASIR_RETURN_IF_ERROR(checkpoint.CheckTensors());
  const std::string plan_path = absl::StrCat(folder, "/kv_plan.json");
  if (FileExists(plan_path)) {
    KVASIR_ASSIGN_OR_RETURN(checkpoint.kv_plan_json_,
                            ReadSmallFile(plan_path, kMaxPlanBytes));
  }
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
        absl::StrFormat("%s: tensor %s is missing", folder_, name));
  }
  if (!IsWeightType(entry->info->type)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: tensor %s: want F32, F16 or BF16, have %s", entry->file->path(),
        name, TensorTypeName(entry->info->type)));
  }
  return *entry;
}

absl::Status Checkpoint::CheckTensors() const {
  for (const RequiredTensor& want : RequiredTensors(spec())) {
    KVASIR_ASSIGN_OR_RETURN(const TensorStore::Entry have, Tensor(want.name));
    if (have.info->shape != want.shape) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s: tensor %s: want shape %s, have %s", have.file->path(), want.name,
          ShapeText(want.shape), ShapeText(have.info->shape)));
    }
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
