#include "model/gguf/gguf_header.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <span>
#include <system_error>
#include <tuple>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace kvasir::model {
namespace {

constexpr std::string_view kMagic = "GGUF";
constexpr uint64_t kFirstReadBytes = 1 << 20;
constexpr uint64_t kMaxKeyBytes = 65535;  // the format's own limit
constexpr uint64_t kMaxTensorNameBytes = 127;
constexpr uint32_t kMaxDims = 4;
constexpr uint64_t kDefaultAlignment = 32;
constexpr uint64_t kMaxAlignment = 1 << 20;
constexpr char kAlignmentKey[] = "general.alignment";

struct ValueTypeRow {
  std::string_view name;
  uint64_t bytes;  // the fewest bytes that an element takes in the file
};
// Indexed by GgufType.
constexpr std::array<ValueTypeRow, 13> kValueTypes = {{
    {"u8", 1},
    {"i8", 1},
    {"u16", 2},
    {"i16", 2},
    {"u32", 4},
    {"i32", 4},
    {"f32", 4},
    {"bool", 1},
    {"string", 8},
    {"array", 12},
    {"u64", 8},
    {"i64", 8},
    {"f64", 8},
}};

const ValueTypeRow& RowOf(GgufType type) {
  return kValueTypes[static_cast<size_t>(type)];
}

template <typename T>
T Load(std::string_view bytes) {
  T value;
  std::memcpy(&value, bytes.data(), sizeof(value));
  return value;
}

// Returns a text of the file for error messages: shortened, with all bytes
// escaped that are not printable ASCII.
std::string Shown(std::string_view text) {
  constexpr size_t kMost = 80;
  return absl::CHexEscape(
      absl::string_view(text.data(), std::min(text.size(), kMost)));
}

// Reads an integer of any integer type. Returns nullopt for other types, and
// for a number that int64_t cannot hold.
std::optional<int64_t> LoadInt(GgufType type, std::string_view bytes) {
  switch (type) {
    case GgufType::kU8:
      return Load<uint8_t>(bytes);
    case GgufType::kI8:
      return Load<int8_t>(bytes);
    case GgufType::kU16:
      return Load<uint16_t>(bytes);
    case GgufType::kI16:
      return Load<int16_t>(bytes);
    case GgufType::kU32:
      return Load<uint32_t>(bytes);
    case GgufType::kI32:
      return Load<int32_t>(bytes);
    case GgufType::kI64:
      return Load<int64_t>(bytes);
    case GgufType::kU64: {
      const auto value = Load<uint64_t>(bytes);
      if (value > uint64_t{std::numeric_limits<int64_t>::max()}) {
        return std::nullopt;
      }
      return static_cast<int64_t>(value);
    }
    default:
      return std::nullopt;
  }
}

}  // namespace

double ShortestDecimal(float value) {
  std::array<char, 64> text{};
  const auto end =
      std::to_chars(text.data(), text.data() + text.size() - 1, value);
  *end.ptr = '\0';
  return std::strtod(text.data(), nullptr);
}

int64_t GgufTensor::num_elements() const {
  int64_t count = 1;
  for (const int64_t dim : shape) count *= dim;
  return count;
}

// Reads the header from front to back.
class GgufHeaderReader {
 public:
  GgufHeaderReader(uint64_t file_bytes, GgufHeader* header)
      : text_(header->text_.data(), header->text_.size()),
        file_bytes_(file_bytes),
        header_(*header) {}

  absl::Status Run() {
    KVASIR_ASSIGN_OR_RETURN(const uint64_t num_tensors, ReadStart());
    for (uint64_t i = 0; i < num_keys_; ++i) {
      KVASIR_RETURN_IF_ERROR(ReadKey(i));
    }
    KVASIR_RETURN_IF_ERROR(ReadAlignment());
    for (uint64_t i = 0; i < num_tensors; ++i) {
      KVASIR_RETURN_IF_ERROR(ReadTensor(i));
    }
    return PlaceTensors();
  }

 private:
  std::string Where() const {
    return absl::StrFormat("%s: byte %d", header_.where_, at_);
  }

  // Returns the next bytes and moves past them. DATA_LOSS if the file ends
  // before they do. OUT_OF_RANGE if only the part of the file that was read
  // ends before they do.
  absl::StatusOr<std::string_view> Take(uint64_t size, std::string_view what) {
    if (size > file_bytes_ - at_) {
      return absl::DataLossError(absl::StrFormat(
          "%s: %s takes %d bytes, but only %d bytes of the file are left",
          Where(), what, size, file_bytes_ - at_));
    }
    if (size > text_.size() - at_) {
      return absl::OutOfRangeError(absl::StrFormat(
          "%s: %s does not end in the first %d bytes of the file", Where(),
          what, text_.size()));
    }
    const std::string_view bytes = text_.substr(at_, size);
    at_ += size;
    return bytes;
  }

  template <typename T>
  absl::StatusOr<T> Number(std::string_view what) {
    KVASIR_ASSIGN_OR_RETURN(const std::string_view bytes,
                            Take(sizeof(T), what));
    return Load<T>(bytes);
  }

  absl::StatusOr<std::string_view> Text(std::string_view what) {
    KVASIR_ASSIGN_OR_RETURN(const uint64_t size, Number<uint64_t>(what));
    return Take(size, what);
  }

  // Reads the magic word, the version and the counts. Returns the number
  // of tensors.
  absl::StatusOr<uint64_t> ReadStart() {
    KVASIR_ASSIGN_OR_RETURN(const std::string_view magic,
                            Take(kMagic.size(), "the word GGUF"));
    if (magic != kMagic) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s is neither a folder nor a GGUF file: it begins with \"%s\" "
          "instead of \"%s\"",
          header_.where_, Shown(magic), kMagic));
    }
    KVASIR_ASSIGN_OR_RETURN(const uint32_t version,
                            Number<uint32_t>("the version"));
    if (version != 2 && version != 3) {
      return absl::UnimplementedError(absl::StrFormat(
          "%s: the GGUF version is %d%s, but must be 2 or 3, little-endian",
          header_.where_, version,
          (version & 0xffff) == 0 ? " (a big-endian file)" : ""));
    }
    KVASIR_ASSIGN_OR_RETURN(const uint64_t num_tensors,
                            Number<uint64_t>("the number of tensors"));
    KVASIR_ASSIGN_OR_RETURN(num_keys_, Number<uint64_t>("the number of keys"));
    for (const auto& [count, limit, what] :
         {std::tuple(num_tensors, GgufHeader::kMaxTensors, "tensors"),
          std::tuple(num_keys_, GgufHeader::kMaxKeys, "keys")}) {
      if (count <= limit) continue;
      return absl::ResourceExhaustedError(
          absl::StrFormat("%s: the header states %d %s, but the limit is %d",
                          header_.where_, count, what, limit));
    }
    return num_tensors;
  }

  absl::StatusOr<GgufType> ReadType(std::string_view what) {
    KVASIR_ASSIGN_OR_RETURN(const uint32_t type, Number<uint32_t>(what));
    if (type < kValueTypes.size()) return static_cast<GgufType>(type);
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: %s is %d, but the largest known type is %d",
                        Where(), what, type, kValueTypes.size() - 1));
  }

  absl::Status ReadKey(uint64_t index) {
    KVASIR_ASSIGN_OR_RETURN(const std::string_view key,
                            Text(absl::StrFormat("the text of key %d", index)));
    if (key.empty() || key.size() > kMaxKeyBytes) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: key %d has %d bytes, but must have 1 to %d",
                          header_.where_, index, key.size(), kMaxKeyBytes));
    }
    const std::string shown = Shown(key);
    const auto [place, is_new] = header_.values_.try_emplace(key);
    if (!is_new) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s: the key %s occurs twice", header_.where_, shown));
    }
    GgufValue& value = place->second;
    KVASIR_ASSIGN_OR_RETURN(value.type,
                            ReadType(absl::StrCat("the type of ", shown)));
    if (value.type == GgufType::kArray) {
      value.is_array = true;
      KVASIR_ASSIGN_OR_RETURN(
          value.type,
          ReadType(absl::StrCat("the type of the elements of ", shown)));
      if (value.type == GgufType::kArray) {
        return absl::UnimplementedError(
            absl::StrFormat("%s: %s is an array of arrays, which is not served",
                            header_.where_, shown));
      }
      KVASIR_ASSIGN_OR_RETURN(
          value.count, Number<uint64_t>(absl::StrCat("the length of ", shown)));
    }
    const uint64_t least = RowOf(value.type).bytes;
    if (value.count > (file_bytes_ - at_) / least) {
      return absl::DataLossError(absl::StrFormat(
          "%s: %s has %d elements of at least %d bytes, but only %d bytes of "
          "the file are left",
          Where(), shown, value.count, least, file_bytes_ - at_));
    }
    if (value.type != GgufType::kString) {
      KVASIR_ASSIGN_OR_RETURN(value.bytes, Take(value.count * least, shown));
      if (value.type != GgufType::kBool) return absl::OkStatus();
      const auto wrong = std::find_if(value.bytes.begin(), value.bytes.end(),
                                      [](char c) { return c != 0 && c != 1; });
      if (wrong == value.bytes.end()) return absl::OkStatus();
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: %s has a bool of %d, but it must be 0 or 1",
                          header_.where_, shown, static_cast<uint8_t>(*wrong)));
    }
    const uint64_t begin = at_;
    for (uint64_t i = 0; i < value.count; ++i) {
      KVASIR_RETURN_IF_ERROR(Text(shown).status());
    }
    value.bytes = text_.substr(begin, at_ - begin);
    return absl::OkStatus();
  }

  absl::Status ReadAlignment() {
    KVASIR_ASSIGN_OR_RETURN(const std::optional<int64_t> given,
                            header_.Int(kAlignmentKey));
    if (!given.has_value()) return absl::OkStatus();
    const auto value = static_cast<uint64_t>(*given);
    if (*given < 1 || value > kMaxAlignment || (value & (value - 1)) != 0) {
      return header_.Error(
          kAlignmentKey,
          absl::StrFormat("want a power of two up to %d, have %d",
                          kMaxAlignment, *given));
    }
    alignment_ = value;
    return absl::OkStatus();
  }

  absl::Status ReadTensor(uint64_t index) {
    const std::string what = absl::StrFormat("tensor %d", index);
    KVASIR_ASSIGN_OR_RETURN(const std::string_view name, Text(what));
    if (name.empty() || name.size() > kMaxTensorNameBytes) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s: the name of %s has %d bytes, but must have 1 to %d",
          header_.where_, what, name.size(), kMaxTensorNameBytes));
    }
    const auto fail = [&](std::string_view problem) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s: tensor %s: %s", header_.where_, Shown(name), problem));
    };
    if (!std::all_of(name.begin(), name.end(), absl::ascii_isgraph)) {
      return fail("the name must consist of printable ASCII characters");
    }
    if (!header_.tensor_places_.emplace(name, index).second) {
      return fail("occurs twice");
    }
    GgufTensor tensor;
    tensor.name = name;
    KVASIR_ASSIGN_OR_RETURN(const uint32_t dims, Number<uint32_t>(what));
    if (dims < 1 || dims > kMaxDims) {
      return fail(
          absl::StrFormat("has %d dimensions; want 1 to %d", dims, kMaxDims));
    }
    uint64_t elements = 1;
    for (uint32_t i = 0; i < dims; ++i) {
      KVASIR_ASSIGN_OR_RETURN(const uint64_t dim, Number<uint64_t>(what));
      // The limit keeps every later product of sizes inside 64 bits.
      constexpr uint64_t kMaxElements = uint64_t{1} << 56;
      if (dim == 0 || dim > kMaxElements / elements) {
        return fail(absl::StrFormat(
            "dimension %d is %d; want at least 1, and at most %d elements in "
            "the tensor",
            i, dim, kMaxElements));
      }
      elements *= dim;
      tensor.shape.insert(tensor.shape.begin(), static_cast<int64_t>(dim));
    }
    KVASIR_ASSIGN_OR_RETURN(const uint32_t type, Number<uint32_t>(what));
    tensor.type = FindGgmlType(type);
    if (tensor.type == nullptr) {
      const std::string_view unserved = UnservedGgmlTypeName(type);
      if (unserved.empty()) {
        return fail(absl::StrFormat("has the unknown type %d; served are %s",
                                    type, ServedGgmlTypes()));
      }
      return absl::UnimplementedError(absl::StrFormat(
          "%s: tensor %s has the type %s, which is not served; served are %s",
          header_.where_, Shown(name), unserved, ServedGgmlTypes()));
    }
    if (tensor.shape.back() % tensor.type->block_numbers != 0) {
      return fail(absl::StrFormat(
          "a row has %d numbers; want a multiple of %d, the length of a block "
          "of %s",
          tensor.shape.back(), tensor.type->block_numbers, tensor.type->name));
    }
    tensor.size_bytes = elements /
                        static_cast<uint64_t>(tensor.type->block_numbers) *
                        static_cast<uint64_t>(tensor.type->block_bytes);
    KVASIR_ASSIGN_OR_RETURN(tensor.begin_bytes, Number<uint64_t>(what));
    if (tensor.begin_bytes % alignment_ != 0) {
      return fail(absl::StrFormat(
          "its offset is %d; want a multiple of the alignment %d",
          tensor.begin_bytes, alignment_));
    }
    header_.tensors_.push_back(std::move(tensor));
    return absl::OkStatus();
  }

  // Converts tensors' offsets in the data section to offsets in the file, and
  // checks them.
  absl::Status PlaceTensors() {
    const uint64_t data = (at_ + alignment_ - 1) / alignment_ * alignment_;
    const uint64_t data_bytes = file_bytes_ - std::min(data, file_bytes_);
    std::vector<GgufTensor*> sorted;
    for (GgufTensor& tensor : header_.tensors_) {
      if (tensor.begin_bytes > data_bytes ||
          tensor.size_bytes > data_bytes - tensor.begin_bytes) {
        return absl::DataLossError(absl::StrFormat(
            "%s: tensor %s: offset %d plus %d bytes is beyond the %d bytes of "
            "data in the file; is it truncated?",
            header_.where_, tensor.name, tensor.begin_bytes, tensor.size_bytes,
            data_bytes));
      }
      tensor.begin_bytes += data;
      sorted.push_back(&tensor);
    }
    std::sort(sorted.begin(), sorted.end(), [](const auto* a, const auto* b) {
      return a->begin_bytes < b->begin_bytes;
    });
    for (size_t i = 1; i < sorted.size(); ++i) {
      const GgufTensor& before = *sorted[i - 1];
      const GgufTensor& tensor = *sorted[i];
      if (before.begin_bytes + before.size_bytes <= tensor.begin_bytes) {
        continue;
      }
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s: tensor %s begins at byte %d, but tensor %s ends only at byte %d",
          header_.where_, tensor.name, tensor.begin_bytes, before.name,
          before.begin_bytes + before.size_bytes));
    }
    return absl::OkStatus();
  }

  const std::string_view text_;
  const uint64_t file_bytes_;
  GgufHeader& header_;
  uint64_t at_ = 0;
  uint64_t num_keys_ = 0;
  uint64_t alignment_ = kDefaultAlignment;
};

absl::StatusOr<GgufHeader> GgufHeader::Parse(std::string_view text,
                                             uint64_t file_bytes,
                                             const std::string& where) {
  return ParseOwned(std::vector<char>(text.begin(), text.end()), file_bytes,
                    where);
}

absl::StatusOr<GgufHeader> GgufHeader::ParseOwned(std::vector<char> text,
                                                  uint64_t file_bytes,
                                                  const std::string& where) {
  GgufHeader header;
  header.where_ = where;
  header.text_ = std::move(text);
  KVASIR_RETURN_IF_ERROR(GgufHeaderReader(file_bytes, &header).Run());
  return header;
}

absl::StatusOr<GgufHeader> GgufHeader::Read(const RandomAccessFile& file) {
  // The length of the header is known only at its end. Each try reads four
  // times as much as the one before.
  for (uint64_t bytes = kFirstReadBytes;; bytes *= 4) {
    std::vector<char> text(
        std::min({bytes, file.size_bytes(), kMaxHeaderBytes}));
    KVASIR_RETURN_IF_ERROR(
        file.Read(0, std::as_writable_bytes(std::span<char>(text))));
    KVASIR_RETURN_IF_ERROR(CheckNoLfsPointer(
        std::string_view(text.data(), text.size()).substr(0, 64), file.path()));
    absl::StatusOr<GgufHeader> header =
        ParseOwned(std::move(text), file.size_bytes(), file.path());
    if (!absl::IsOutOfRange(header.status())) return header;
    if (bytes >= kMaxHeaderBytes) {
      return absl::ResourceExhaustedError(
          absl::StrFormat("%s; the limit of a header is %d bytes",
                          header.status().message(), kMaxHeaderBytes));
    }
  }
}

absl::StatusOr<GgufHeader> GgufHeader::Open(const std::string& path) {
  KVASIR_ASSIGN_OR_RETURN(const RandomAccessFile file,
                          RandomAccessFile::Open(path));
  return Read(file);
}

absl::Status GgufHeader::Append(const GgufHeader& next) {
  if (next.tensors_.size() > kMaxTensors - tensors_.size()) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("%s: the model has more than %d tensors in its files",
                        next.where_, kMaxTensors));
  }
  for (const GgufTensor& tensor : next.tensors_) {
    if (!tensor_places_.emplace(tensor.name, tensors_.size()).second) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s: tensor %s is also in an earlier file of the model", next.where_,
          tensor.name));
    }
    tensors_.push_back(tensor);
    tensors_.back().file = num_files_;
  }
  ++num_files_;
  return absl::OkStatus();
}

const GgufTensor* GgufHeader::FindTensor(std::string_view name) const {
  const auto found = tensor_places_.find(name);
  return found == tensor_places_.end() ? nullptr : &tensors_[found->second];
}

const GgufValue* GgufHeader::Find(std::string_view key) const {
  const auto found = values_.find(key);
  return found == values_.end() ? nullptr : &found->second;
}

absl::Status GgufHeader::Error(std::string_view key,
                               std::string_view what) const {
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: %s: %s", where_, Shown(key), what));
}

absl::Status GgufHeader::Unserved(std::string_view key,
                                  std::string_view what) const {
  return absl::UnimplementedError(
      absl::StrFormat("%s: %s: %s", where_, Shown(key), what));
}

absl::Status GgufHeader::TypeError(std::string_view key, std::string_view want,
                                   const GgufValue& have) const {
  return Error(key, absl::StrFormat("want %s, have %s%s", want,
                                    have.is_array ? "an array of "
                                                  : "a value "
                                                    "of type ",
                                    RowOf(have.type).name));
}

absl::StatusOr<std::optional<int64_t>> GgufHeader::Int(
    std::string_view key) const {
  const GgufValue* const value = Find(key);
  if (value == nullptr) return std::optional<int64_t>();
  const std::optional<int64_t> number =
      value->is_array ? std::nullopt : LoadInt(value->type, value->bytes);
  if (!number.has_value()) {
    return TypeError(key, "an integer below 2^63", *value);
  }
  return number;
}

absl::StatusOr<std::optional<double>> GgufHeader::Number(
    std::string_view key) const {
  const GgufValue* const value = Find(key);
  if (value == nullptr) return std::optional<double>();
  std::optional<double> number;
  if (!value->is_array && value->type == GgufType::kF32) {
    const float stored = Load<float>(value->bytes);
    number = std::isfinite(stored) ? ShortestDecimal(stored) : stored;
  } else if (!value->is_array && value->type == GgufType::kF64) {
    number = Load<double>(value->bytes);
  } else if (!value->is_array) {
    number = LoadInt(value->type, value->bytes);
  }
  if (!number.has_value()) {
    return TypeError(key, "a number (an integer must be below 2^63)", *value);
  }
  if (!std::isfinite(*number)) {
    return Error(key,
                 absl::StrFormat("want a finite number, have %g", *number));
  }
  return number;
}

absl::StatusOr<std::optional<bool>> GgufHeader::Bool(
    std::string_view key) const {
  const GgufValue* const value = Find(key);
  if (value == nullptr) return std::optional<bool>();
  if (value->is_array || value->type != GgufType::kBool) {
    return TypeError(key, "a bool", *value);
  }
  return std::optional<bool>(value->bytes[0] != 0);
}

absl::StatusOr<std::optional<std::string_view>> GgufHeader::String(
    std::string_view key) const {
  const GgufValue* const value = Find(key);
  if (value == nullptr) return std::optional<std::string_view>();
  if (value->is_array || value->type != GgufType::kString) {
    return TypeError(key, "a string", *value);
  }
  return std::optional<std::string_view>(value->bytes.substr(sizeof(uint64_t)));
}

absl::StatusOr<std::vector<std::string_view>> GgufHeader::Strings(
    std::string_view key) const {
  std::vector<std::string_view> strings;
  const GgufValue* const value = Find(key);
  if (value == nullptr) return strings;
  if (!value->is_array || value->type != GgufType::kString) {
    return TypeError(key, "an array of strings", *value);
  }
  strings.reserve(value->count);
  std::string_view rest = value->bytes;
  for (uint64_t i = 0; i < value->count; ++i) {
    const auto size = Load<uint64_t>(rest);  // GgufHeaderReader has checked it
    strings.push_back(rest.substr(sizeof(size), size));
    rest.remove_prefix(sizeof(size) + size);
  }
  return strings;
}

absl::StatusOr<std::vector<int64_t>> GgufHeader::Ints(
    std::string_view key) const {
  std::vector<int64_t> numbers;
  const GgufValue* const value = Find(key);
  if (value == nullptr) return numbers;
  if (!value->is_array) return TypeError(key, "an array of integers", *value);
  numbers.reserve(value->count);
  const uint64_t width = RowOf(value->type).bytes;
  for (uint64_t i = 0; i < value->count; ++i) {
    const std::optional<int64_t> number =
        LoadInt(value->type, value->bytes.substr(i * width, width));
    if (!number.has_value()) {
      return TypeError(key, "an array of integers below 2^63", *value);
    }
    numbers.push_back(*number);
  }
  return numbers;
}

absl::StatusOr<std::vector<float>> GgufHeader::Floats(
    std::string_view key) const {
  std::vector<float> numbers;
  const GgufValue* const value = Find(key);
  if (value == nullptr) return numbers;
  if (!value->is_array || value->type != GgufType::kF32) {
    return TypeError(key, "an array of f32", *value);
  }
  numbers.resize(value->count);
  if (!numbers.empty()) {
    std::memcpy(numbers.data(), value->bytes.data(), value->bytes.size());
  }
  return numbers;
}

bool MayBeGguf(const std::string& path) {
  std::error_code error;
  return std::filesystem::is_regular_file(path, error);
}

}  // namespace kvasir::model
