#include "model/checkpoint/gguf_tensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "model/files/file.h"
#include "model/gguf/gguf_blocks.h"
#include "model/gguf/gguf_family.h"
#include "model/gguf/gguf_header.h"

namespace kvasir::model {
namespace {

struct NameRow {
  std::string_view stored;
  std::string_view ours;
};

constexpr std::string_view kLayers = "blk.";
constexpr std::string_view kOurLayers = "model.layers.";
// A tensor's name is the module's name, and then "weight" or "bias".
constexpr std::array<NameRow, 11> kInLayer = {{
    {"attn_norm.", "input_layernorm."},
    {"attn_q.", "self_attn.q_proj."},
    {"attn_k.", "self_attn.k_proj."},
    {"attn_v.", "self_attn.v_proj."},
    {"attn_q_norm.", "self_attn.q_norm."},
    {"attn_k_norm.", "self_attn.k_norm."},
    {"attn_output.", "self_attn.o_proj."},
    {"ffn_norm.", "post_attention_layernorm."},
    {"ffn_gate.", "mlp.gate_proj."},
    {"ffn_up.", "mlp.up_proj."},
    {"ffn_down.", "mlp.down_proj."},
}};
constexpr std::array<NameRow, 3> kOuter = {{
    {"token_embd.", "model.embed_tokens."},
    {"output_norm.", "model.norm."},
    {"output.", "lm_head."},
}};

using NameOfRow = std::string_view NameRow::*;

// Replaces the module's name in `name`, if a row has it.
std::optional<std::string> Translate(std::span<const NameRow> rows,
                                     std::string_view name, NameOfRow from,
                                     NameOfRow to) {
  for (const NameRow& row : rows) {
    if (!name.starts_with(row.*from)) continue;
    const std::string_view leaf = name.substr((row.*from).size());
    if (leaf != "weight" && leaf != "bias") continue;
    return absl::StrFormat("%s%s", row.*to, leaf);
  }
  return std::nullopt;
}

std::optional<std::string> Translate(std::string_view name, NameOfRow from,
                                     NameOfRow to, std::string_view layers_from,
                                     std::string_view layers_to) {
  if (!name.starts_with(layers_from)) {
    return Translate(kOuter, name, from, to);
  }
  name.remove_prefix(layers_from.size());
  const size_t digits = name.find_first_not_of("0123456789");
  if (digits == 0 || digits == name.npos || name[digits] != '.') {
    return std::nullopt;
  }
  const auto module = Translate(kInLayer, name.substr(digits + 1), from, to);
  if (!module.has_value()) return std::nullopt;
  return absl::StrFormat("%s%s%s", layers_to, name.substr(0, digits + 1),
                         *module);
}

std::optional<std::string> OurNameOf(std::string_view stored) {
  return Translate(stored, &NameRow::stored, &NameRow::ours, kLayers,
                   kOurLayers);
}

// The type with which the engine gets a tensor.
TensorType ServedType(const GgmlType& type) {
  if (type.name == "F32") return TensorType::kF32;
  return type.name == "F16" ? TensorType::kF16 : TensorType::kBF16;
}

uint16_t ToBf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  // Rounding could turn a NaN into an infinity.
  if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// How a tensor is stored.
struct Stored {
  const GgmlType* type = nullptr;
  uint64_t begin_bytes = 0;
  int64_t row_elements = 0;
  // If not 0: the file has each block of so many rows in another order. The
  // rows 2p and 2p + 1 of a block are the rows p and p + head_rows / 2 here.
  int64_t head_rows = 0;
};

class GgufTensorFile final : public TensorFile {
 public:
  GgufTensorFile(RandomAccessFile file, std::vector<TensorInfo> tensors,
                 std::vector<Stored> stored)
      : TensorFile(std::move(file), std::move(tensors)),
        stored_(std::move(stored)) {}

 private:
  // Elements [first, first + count) of a tensor, in the order of the file.
  struct Elements {
    int64_t first = 0;
    int64_t count = 0;
  };

  // Tensors have different places, because they do not overlap and none is
  // empty.
  const Stored& StoredOf(const TensorInfo& tensor) const {
    const auto found =
        std::lower_bound(stored_.begin(), stored_.end(), tensor.begin_bytes,
                         [](const Stored& one, uint64_t begin) {
                           return one.begin_bytes < begin;
                         });
    KVASIR_CHECK(found != stored_.end() &&
                 found->begin_bytes == tensor.begin_bytes);
    return *found;
  }

  static FileRange BlocksOf(const Stored& stored, const Elements& elements) {
    const int64_t numbers = stored.type->block_numbers;
    const int64_t first = elements.first / numbers;
    const int64_t end =
        (elements.first + elements.count + numbers - 1) / numbers;
    const int64_t bytes = stored.type->block_bytes;
    return {stored.begin_bytes + static_cast<uint64_t>(first * bytes),
            static_cast<uint64_t>((end - first) * bytes)};
  }

  FileRange RangeOf(const TensorInfo& tensor, uint64_t offset_bytes,
                    uint64_t size_bytes) const override {
    const Stored& stored = StoredOf(tensor);
    const int64_t width = TensorTypeBits(tensor.type) / 8;
    int64_t first = static_cast<int64_t>(offset_bytes) / width;
    int64_t end = static_cast<int64_t>(offset_bytes + size_bytes) / width;
    if (stored.head_rows > 0) {
      const int64_t head = stored.head_rows * stored.row_elements;
      first = first / head * head;
      end = (end + head - 1) / head * head;
    }
    return BlocksOf(stored, {first, end - first});
  }

  absl::Status ReadWhole(const TensorInfo& tensor, uint64_t offset_bytes,
                         std::span<std::byte> out) const override {
    const Stored& stored = StoredOf(tensor);
    const auto width = static_cast<size_t>(TensorTypeBits(tensor.type) / 8);
    if (offset_bytes % width != 0 || out.size() % width != 0) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s: cannot read %d bytes at offset %d: both must be multiples of "
          "%d bytes",
          path(), out.size(), offset_bytes, width));
    }
    auto at = static_cast<int64_t>(offset_bytes / width);
    std::vector<uint8_t> blocks;
    while (!out.empty()) {
      const auto left = static_cast<int64_t>(out.size() / width);
      Elements elements = {at, left};
      if (stored.head_rows > 0) {
        const int64_t row = at / stored.row_elements;
        const int64_t inside = at % stored.row_elements;
        elements.first =
            StoredRow(row, stored.head_rows) * stored.row_elements + inside;
        elements.count = std::min(left, stored.row_elements - inside);
      }
      const auto bytes = static_cast<size_t>(elements.count) * width;
      KVASIR_RETURN_IF_ERROR(
          ReadElements(stored, elements, out.first(bytes), &blocks));
      out = out.subspan(bytes);
      at += elements.count;
    }
    return absl::OkStatus();
  }

  static int64_t StoredRow(int64_t row, int64_t head_rows) {
    const int64_t inside = row % head_rows;
    const int64_t half = head_rows / 2;
    return row - inside + inside % half * 2 + inside / half;
  }

  // `blocks` is a buffer, which is kept between calls.
  absl::Status ReadElements(const Stored& stored, const Elements& elements,
                            std::span<std::byte> out,
                            std::vector<uint8_t>* blocks) const {
    const int64_t numbers = stored.type->block_numbers;
    if (numbers == 1) {
      return file().Read(BlocksOf(stored, elements).begin_bytes, out);
    }
    // Bounds the buffer.
    constexpr int64_t kMostElements = 1 << 17;
    std::array<float, kMaxBlockNumbers> unpacked;
    for (int64_t done = 0; done < elements.count;) {
      Elements part = {elements.first + done,
                       std::min(elements.count - done, kMostElements)};
      const FileRange range = BlocksOf(stored, part);
      blocks->resize(range.size_bytes);
      KVASIR_RETURN_IF_ERROR(
          file().Read(range.begin_bytes,
                      std::as_writable_bytes(std::span<uint8_t>(*blocks))));
      const uint8_t* block = blocks->data();
      for (int64_t at = 0; at < part.count;) {
        stored.type->unpack(block, unpacked.data());
        block += stored.type->block_bytes;
        const int64_t skipped = (part.first + at) % numbers;
        const int64_t count = std::min(numbers - skipped, part.count - at);
        for (int64_t i = 0; i < count; ++i) {
          const uint16_t number =
              ToBf16(unpacked[static_cast<size_t>(skipped + i)]);
          std::memcpy(out.data() + static_cast<size_t>(done + at + i) * 2,
                      &number, sizeof(number));
        }
        at += count;
      }
      done += part.count;
    }
    return absl::OkStatus();
  }

  const std::vector<Stored> stored_;  // sorted by place
};

// The rows of a head that the file has in another order, or 0.
absl::StatusOr<int64_t> HeadRows(const GgufHeader& header,
                                 const GgufTensor& tensor,
                                 const DecoderSpec& spec) {
  const bool is_query = absl::StrContains(tensor.name, ".attn_q.");
  if (!is_query && !absl::StrContains(tensor.name, ".attn_k.")) return 0;
  const int64_t heads = is_query ? spec.num_heads : spec.num_kv_heads;
  const int64_t rows = tensor.shape[0];
  if (rows == heads * spec.head_dim) return spec.head_dim;
  return header.Error(
      tensor.name,
      absl::StrFormat("want %d rows, %d heads of %d, have %d",
                      heads * spec.head_dim, heads, spec.head_dim, rows));
}

}  // namespace

absl::StatusOr<TensorStore> OpenGgufTensors(const std::string& path,
                                            const DecoderSpec& spec) {
  KVASIR_ASSIGN_OR_RETURN(RandomAccessFile file, RandomAccessFile::Open(path));
  KVASIR_ASSIGN_OR_RETURN(const GgufHeader header, GgufHeader::Read(file));
  KVASIR_ASSIGN_OR_RETURN(const std::optional<std::string_view> architecture,
                          header.String("general.architecture"));
  const GgufFamily* const family = FindGgufFamily(architecture.value_or(""));
  if (family == nullptr) {
    return header.Error("general.architecture", "has changed meanwhile");
  }
  std::vector<TensorInfo> tensors;
  std::vector<Stored> all_stored;
  for (const GgufTensor& tensor : header.tensors()) {
    if (tensor.name == kGgufRopeFactors) continue;  // LoadModelConfig reads it
    if (!OurNameOf(tensor.name).has_value()) {
      return header.Unserved(
          tensor.name,
          absl::StrFormat("the architecture %s has no such tensor, so the "
                          "model needs a computation that this engine does not "
                          "support",
                          family->architecture));
    }
    Stored stored;
    stored.type = tensor.type;
    stored.begin_bytes = tensor.begin_bytes;
    stored.row_elements = tensor.num_elements() / tensor.shape[0];
    if (family->neighbour_pairs) {
      KVASIR_ASSIGN_OR_RETURN(stored.head_rows, HeadRows(header, tensor, spec));
    }
    all_stored.push_back(stored);
    TensorInfo info;
    info.name = tensor.name;
    info.type = ServedType(*tensor.type);
    info.shape = tensor.shape;
    info.begin_bytes = tensor.begin_bytes;
    info.size_bytes = static_cast<uint64_t>(tensor.num_elements() *
                                            TensorTypeBits(info.type) / 8);
    tensors.push_back(std::move(info));
  }
  std::sort(all_stored.begin(), all_stored.end(),
            [](const Stored& a, const Stored& b) {
              return a.begin_bytes < b.begin_bytes;
            });
  TensorStore store = TensorStore::Of(std::make_unique<GgufTensorFile>(
      std::move(file), std::move(tensors), std::move(all_stored)));
  KVASIR_RETURN_IF_ERROR(
      store.Rename([](const TensorStore::Entry& entry)
                       -> absl::StatusOr<std::vector<TensorView>> {
        return std::vector<TensorView>{
            {OurNameOf(entry.info->name).value(), {}, 0}};
      }));
  return store;
}

std::string GgufNameOf(std::string_view name) {
  return Translate(name, &NameRow::ours, &NameRow::stored, kOurLayers, kLayers)
      .value_or(std::string(name));
}

}  // namespace kvasir::model
