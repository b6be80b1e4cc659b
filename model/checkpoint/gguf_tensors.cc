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
#include "model/gguf/gguf_model.h"

namespace kvasir::model {
namespace {

// Names the rows of a stored tensor that belong to a canonical tensor.
enum class Part { kAll, kQueries, kKeys, kValues, kGate, kUp, kExpert };

// The stored name of a module, and its canonical name. A tensor's name is
// the module's name, and then "weight" or "bias". '#' stands for an
// expert's number.
struct NameRow {
  std::string_view stored;
  std::string_view ours;
  Part part = Part::kAll;
};

constexpr std::string_view kLayers = "blk.";
constexpr std::string_view kOurLayers = "model.layers.";
// The table of fused tensors. GgufFused::kQkv uses only its first kQkvRows.
constexpr std::array<NameRow, 5> kFused = {{
    {"attn_qkv.", "self_attn.q_proj.", Part::kQueries},
    {"attn_qkv.", "self_attn.k_proj.", Part::kKeys},
    {"attn_qkv.", "self_attn.v_proj.", Part::kValues},
    {"ffn_up.", "mlp.gate_proj.", Part::kGate},
    {"ffn_up.", "mlp.up_proj.", Part::kUp},
}};
constexpr size_t kQkvRows = 3;
constexpr std::array<NameRow, 20> kInLayer = {{
    {"attn_norm.", "input_layernorm."},
    {"attn_q.", "self_attn.q_proj."},
    {"attn_k.", "self_attn.k_proj."},
    {"attn_v.", "self_attn.v_proj."},
    {"attn_q_norm.", "self_attn.q_norm."},
    {"attn_k_norm.", "self_attn.k_norm."},
    {"attn_output.", "self_attn.o_proj."},
    {"post_attention_norm.", "self_attn.output_norm."},
    {"ffn_norm.", "post_attention_layernorm."},
    {"ffn_gate.", "mlp.gate_proj."},
    {"ffn_up.", "mlp.up_proj."},
    {"ffn_down.", "mlp.down_proj."},
    {"post_ffw_norm.", "mlp.output_norm."},
    {"ffn_gate_inp.", "mlp.gate."},
    {"ffn_gate_exps.", "mlp.experts.#.gate_proj.", Part::kExpert},
    {"ffn_up_exps.", "mlp.experts.#.up_proj.", Part::kExpert},
    {"ffn_down_exps.", "mlp.experts.#.down_proj.", Part::kExpert},
    // Files of Mixtral from before April 2024 have a tensor for each expert.
    {"ffn_gate.#.", "mlp.experts.#.gate_proj."},
    {"ffn_up.#.", "mlp.experts.#.up_proj."},
    {"ffn_down.#.", "mlp.experts.#.down_proj."},
}};
constexpr std::array<NameRow, 3> kOuter = {{
    {"token_embd.", "model.embed_tokens."},
    {"output_norm.", "model.norm."},
    {"output.", "lm_head."},
}};

using NameOfRow = std::string_view NameRow::*;

// A translated name, and the rows of the stored tensor that it names.
struct Renamed {
  std::string name;
  Part part = Part::kAll;
};

std::span<const NameRow> FusedRows(GgufFused fused) {
  const std::span<const NameRow> rows = kFused;
  if (fused == GgufFused::kQkvAndGate) return rows;
  return rows.first(fused == GgufFused::kQkv ? kQkvRows : 0);
}

// Returns `name` with its module's name replaced, once for each row of the
// table that has this module.
std::vector<Renamed> Translate(std::span<const NameRow> rows,
                               std::string_view name, NameOfRow from,
                               NameOfRow to) {
  std::vector<Renamed> renamed;
  for (const NameRow& row : rows) {
    if (!name.starts_with(row.*from)) continue;
    const std::string_view leaf = name.substr((row.*from).size());
    if (leaf != "weight" && leaf != "bias") continue;
    renamed.push_back({absl::StrFormat("%s%s", row.*to, leaf), row.part});
  }
  return renamed;
}

// Returns several names for a fused tensor, and none for an unknown one.
std::vector<Renamed> Translate(GgufFused fused, std::string_view name,
                               NameOfRow from, NameOfRow to,
                               std::string_view layers_from,
                               std::string_view layers_to) {
  if (!name.starts_with(layers_from)) {
    return Translate(kOuter, name, from, to);
  }
  name.remove_prefix(layers_from.size());
  const size_t digits = name.find_first_not_of("0123456789");
  if (digits == 0 || digits == name.npos || name[digits] != '.') return {};
  const std::string_view module = name.substr(digits + 1);
  std::vector<Renamed> renamed = Translate(FusedRows(fused), module, from, to);
  if (renamed.empty()) renamed = Translate(kInLayer, module, from, to);
  for (Renamed& each : renamed) {
    each.name = absl::StrFormat("%s%s%s", layers_to, name.substr(0, digits + 1),
                                each.name);
  }
  return renamed;
}

// A name in which '#' stands for an expert's number.
struct Numbered {
  std::string name;
  std::string number;  // empty if the name has none
};

// Replaces the expert's number, if one follows one of `prefixes`, by '#'.
Numbered WithoutNumber(std::string_view name,
                       std::span<const std::string_view> prefixes) {
  for (const std::string_view prefix : prefixes) {
    const size_t at = name.find(prefix);
    if (at == name.npos) continue;
    const std::string_view rest = name.substr(at + prefix.size());
    const size_t digits =
        std::min(rest.find_first_not_of("0123456789"), rest.size());
    if (digits == 0) break;
    return {absl::StrFormat("%s#%s", name.substr(0, at + prefix.size()),
                            rest.substr(digits)),
            std::string(rest.substr(0, digits))};
  }
  return {std::string(name), ""};
}

// Puts an expert's number in the place of '#'.
std::string WithNumber(std::string_view name, std::string_view number) {
  const size_t mark = name.find('#');
  return absl::StrFormat("%s%s%s", name.substr(0, mark), number,
                         name.substr(mark + 1));
}

std::vector<Renamed> OurNamesOf(const GgufFamily& family,
                                std::string_view stored) {
  constexpr std::array<std::string_view, 3> kPrefixes = {
      ".ffn_gate.", ".ffn_up.", ".ffn_down."};
  const Numbered plain = WithoutNumber(stored, kPrefixes);
  std::vector<Renamed> renamed =
      Translate(family.fused, plain.name, &NameRow::stored, &NameRow::ours,
                kLayers, kOurLayers);
  if (plain.number.empty()) return renamed;
  for (Renamed& each : renamed) each.name = WithNumber(each.name, plain.number);
  return renamed;
}

// Returns the type that a tensor's numbers have after they were read.
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
  // The number of rows in a head if rows are reordered when they are read, else
  // 0. Rows 2p and 2p + 1 of a head in the file become its rows p and p +
  // head_rows / 2.
  int64_t head_rows = 0;
  bool minus_one = false;  // 1 is subtracted from each number; only for F32
};

class GgufTensorFile final : public TensorFile {
 public:
  GgufTensorFile(RandomAccessFile file, std::vector<TensorInfo> tensors,
                 std::vector<Stored> stored)
      : TensorFile(std::move(file), std::move(tensors)),
        stored_(std::move(stored)) {}

 private:
  // Elements [first, first + count) of a tensor, counted in the order of
  // the file.
  struct Elements {
    int64_t first = 0;
    int64_t count = 0;
  };

  // Finds a tensor by its offset in the file. Offsets are unique, because
  // tensors do not overlap and none is empty.
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

  static void SubtractOne(std::span<std::byte> floats) {
    float number = 0;
    for (size_t at = 0; at < floats.size(); at += sizeof(number)) {
      std::memcpy(&number, floats.data() + at, sizeof(number));
      number -= 1;
      std::memcpy(floats.data() + at, &number, sizeof(number));
    }
  }

  // `blocks` is a buffer that is kept between calls.
  absl::Status ReadElements(const Stored& stored, const Elements& elements,
                            std::span<std::byte> out,
                            std::vector<uint8_t>* blocks) const {
    const int64_t numbers = stored.type->block_numbers;
    if (numbers == 1) {
      KVASIR_RETURN_IF_ERROR(
          file().Read(BlocksOf(stored, elements).begin_bytes, out));
      if (stored.minus_one) SubtractOne(out);
      return absl::OkStatus();
    }
    // The number of elements that are read at a time. It limits the
    // size of `blocks`.
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

  const std::vector<Stored> stored_;  // sorted by begin_bytes
};

// Lists the tensors of each file of a model, with their types and shapes
// after conversion.
class TensorLists {
 public:
  TensorLists(const GgufModel& model, const GgufFamily& family,
              const DecoderSpec& spec)
      : header_(model.header),
        family_(family),
        spec_(spec),
        infos_(model.files.size()),
        stored_(model.files.size()) {}

  absl::Status Run() {
    for (const GgufTensor& tensor : header_.tensors()) {
      // LoadModelConfig reads these.
      if (tensor.name == kGgufRopeFactors ||
          (family_.long_rope && (tensor.name == kGgufLongFactors ||
                                 tensor.name == kGgufShortFactors))) {
        continue;
      }
      KVASIR_RETURN_IF_ERROR(Add(tensor));
    }
    for (std::vector<Stored>& list : stored_) {
      std::sort(list.begin(), list.end(), [](const Stored& a, const Stored& b) {
        return a.begin_bytes < b.begin_bytes;
      });
    }
    return absl::OkStatus();
  }

  // Must be called after Run().
  TensorStore Store(std::vector<RandomAccessFile> files) {
    std::vector<std::unique_ptr<TensorFile>> made;
    for (size_t i = 0; i < files.size(); ++i) {
      made.push_back(std::make_unique<GgufTensorFile>(
          std::move(files[i]), std::move(infos_[i]), std::move(stored_[i])));
    }
    return TensorStore::Of(std::move(made));
  }

  // Returns the canonical tensors that a stored tensor contains. Run() must
  // have checked it.
  std::vector<TensorView> ViewsOf(const std::string& stored) const {
    std::vector<TensorView> views;
    for (Renamed& renamed : OurNamesOf(family_, stored)) {
      if (renamed.part == Part::kExpert) {
        const int64_t rows = header_.FindTensor(stored)->shape[1];
        for (int64_t e = 0; e < spec_.experts.count; ++e) {
          views.push_back({WithNumber(renamed.name, absl::StrCat(e)),
                           {e * rows, rows, 0},
                           rows});
        }
        continue;
      }
      const RowBlocks rows = RowsOf(renamed.part);
      views.push_back({std::move(renamed.name), rows, rows.block_rows});
    }
    return views;
  }

 private:
  RowBlocks RowsOf(Part part) const {
    const int64_t q = spec_.num_heads * spec_.head_dim;
    const int64_t kv = spec_.num_kv_heads * spec_.head_dim;
    const int64_t f = spec_.intermediate_size;
    switch (part) {
      case Part::kQueries:
        return {0, q, 0};
      case Part::kKeys:
        return {q, kv, 0};
      case Part::kValues:
        return {q + kv, kv, 0};
      case Part::kGate:
        return {0, f, 0};
      case Part::kUp:
        return {f, f, 0};
      case Part::kAll:
      case Part::kExpert:
        break;
    }
    return {};
  }

  absl::Status Add(const GgufTensor& tensor) {
    const std::vector<Renamed> names = OurNamesOf(family_, tensor.name);
    if (names.empty()) {
      return header_.Unserved(
          tensor.name,
          absl::StrFormat("the architecture %s has no such tensor, so the "
                          "model needs a computation that this engine does not "
                          "support",
                          family_.architecture));
    }
    Stored stored;
    stored.type = tensor.type;
    stored.begin_bytes = tensor.begin_bytes;
    stored.row_elements = tensor.num_elements() / tensor.shape[0];
    TensorInfo info;
    info.name = tensor.name;
    info.type = ServedType(*tensor.type);
    info.shape = tensor.shape;
    if (names[0].part == Part::kExpert) {
      KVASIR_RETURN_IF_ERROR(CheckExperts(tensor));
      info.shape = {tensor.shape[0] * tensor.shape[1], tensor.shape[2]};
    } else {
      // The rows of the last part must end with the tensor's last row.
      const RowBlocks last = RowsOf(names.back().part);
      const int64_t want = last.first + last.block_rows;
      if (!last.all() && tensor.shape[0] != want) {
        return WrongRows(tensor, absl::StrFormat("%d rows", want));
      }
    }
    if (family_.neighbour_pairs) {
      KVASIR_ASSIGN_OR_RETURN(stored.head_rows, HeadRows(tensor));
    }
    if (family_.norms_have_one && tensor.name.ends_with("norm.weight")) {
      stored.minus_one = true;
      if (info.type != TensorType::kF32) {
        return header_.Error(
            tensor.name, absl::StrFormat("the weights of a norm must have the "
                                         "type F32, but have %s",
                                         tensor.type->name));
      }
    }
    info.begin_bytes = tensor.begin_bytes;
    info.size_bytes = static_cast<uint64_t>(tensor.num_elements() *
                                            TensorTypeBits(info.type) / 8);
    infos_[tensor.file].push_back(std::move(info));
    stored_[tensor.file].push_back(stored);
    return absl::OkStatus();
  }

  absl::Status WrongRows(const GgufTensor& tensor,
                         std::string_view want) const {
    return header_.Error(tensor.name,
                         absl::StrFormat("want %s, have the shape %s", want,
                                         ShapeText(tensor.shape)));
  }

  absl::Status CheckExperts(const GgufTensor& tensor) const {
    if (tensor.shape.size() == 3 && tensor.shape[0] == spec_.experts.count) {
      return absl::OkStatus();
    }
    return WrongRows(tensor, absl::StrFormat("the matrices of %d experts",
                                             spec_.experts.count));
  }

  // Returns the number of rows in a head if the file has a head's rows in
  // another order than Hugging Face, else 0.
  absl::StatusOr<int64_t> HeadRows(const GgufTensor& tensor) const {
    const bool is_query = absl::StrContains(tensor.name, ".attn_q.");
    if (!is_query && !absl::StrContains(tensor.name, ".attn_k.")) return 0;
    const int64_t heads = is_query ? spec_.num_heads : spec_.num_kv_heads;
    if (tensor.shape[0] == heads * spec_.head_dim) return spec_.head_dim;
    return WrongRows(
        tensor, absl::StrFormat("%d rows, %d heads of %d",
                                heads * spec_.head_dim, heads, spec_.head_dim));
  }

  const GgufHeader& header_;
  const GgufFamily& family_;
  const DecoderSpec& spec_;
  // Indexed by file.
  std::vector<std::vector<TensorInfo>> infos_;
  std::vector<std::vector<Stored>> stored_;
};

}  // namespace

absl::StatusOr<TensorStore> OpenGgufTensors(const std::string& path,
                                            const DecoderSpec& spec) {
  KVASIR_ASSIGN_OR_RETURN(GgufModel model, OpenGgufModel(path));
  const GgufHeader& header = model.header;
  KVASIR_ASSIGN_OR_RETURN(const std::optional<std::string_view> architecture,
                          header.String("general.architecture"));
  const GgufFamily* const family = FindGgufFamily(architecture.value_or(""));
  if (family == nullptr) {
    return header.Error("general.architecture",
                        "has changed since the model's config was read");
  }
  TensorLists lists(model, *family, spec);
  KVASIR_RETURN_IF_ERROR(lists.Run());
  TensorStore store = lists.Store(std::move(model.files));
  KVASIR_RETURN_IF_ERROR(
      store.Rename([&lists](const TensorStore::Entry& entry)
                       -> absl::StatusOr<std::vector<TensorView>> {
        return lists.ViewsOf(entry.info->name);
      }));
  return store;
}

std::string GgufNameOf(const DecoderSpec& spec, std::string_view name) {
  GgufFused fused = GgufFused::kNone;
  for (const GgufFamily& family : kGgufFamilies) {
    if (family.model_type == spec.model_type) fused = family.fused;
  }
  constexpr std::array<std::string_view, 1> kPrefixes = {"mlp.experts."};
  const std::vector<Renamed> stored =
      Translate(fused, WithoutNumber(name, kPrefixes).name, &NameRow::ours,
                &NameRow::stored, kOurLayers, kLayers);
  return stored.empty() ? std::string(name) : stored[0].name;
}

}  // namespace kvasir::model
