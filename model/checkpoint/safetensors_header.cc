// Parses safetensors headers. It uses SAX events, because a hostile header of
// 100 MB must not become a JSON tree of ten times that size.
#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "model/checkpoint/safetensors.h"
#include "nlohmann/json.hpp"

namespace kvasir::model {
namespace {

using nlohmann::json;

struct TypeRow {
  TensorType type;
  std::string_view name;
  int64_t bits;
};

constexpr std::array<TypeRow, 20> kTypes = {{
    {TensorType::kF32, "F32", 32},       {TensorType::kF16, "F16", 16},
    {TensorType::kBF16, "BF16", 16},     {TensorType::kF64, "F64", 64},
    {TensorType::kI64, "I64", 64},       {TensorType::kI32, "I32", 32},
    {TensorType::kI16, "I16", 16},       {TensorType::kI8, "I8", 8},
    {TensorType::kU64, "U64", 64},       {TensorType::kU32, "U32", 32},
    {TensorType::kU16, "U16", 16},       {TensorType::kU8, "U8", 8},
    {TensorType::kBool, "BOOL", 8},      {TensorType::kF8E4M3, "F8_E4M3", 8},
    {TensorType::kF8E5M2, "F8_E5M2", 8}, {TensorType::kF8E8M0, "F8_E8M0", 8},
    {TensorType::kF6E2M3, "F6_E2M3", 6}, {TensorType::kF6E3M2, "F6_E3M2", 6},
    {TensorType::kF4, "F4", 4},          {TensorType::kC64, "C64", 64},
}};

const TypeRow& RowOf(TensorType type) {
  return *std::find_if(kTypes.begin(), kTypes.end(),
                       [type](const TypeRow& row) { return row.type == type; });
}

constexpr size_t kMaxDims = 16;

// The parser's place in the header.
enum class State {
  kStart,
  kTensors,   // inside the outer object
  kMetadata,  // inside "__metadata__"
  kTensor,    // inside one tensor's object
  kShape,     // inside its shape
  kOffsets,   // inside its offsets
  kEnd,
};

class HeaderHandler final : public nlohmann::json_sax<json> {
 public:
  explicit HeaderHandler(std::string_view where) : where_(where) {}

  const absl::Status& status() const { return status_; }
  std::vector<TensorInfo> TakeTensors() { return std::move(tensors_); }

  bool null() override { return Unexpected("null"); }
  bool boolean(bool) override { return Unexpected("a boolean"); }
  bool number_float(double, const std::string& text) override {
    return Unexpected(text);
  }
  bool binary(binary_t&) override { return Unexpected("binary data"); }
  bool number_integer(int64_t value) override {
    return Unexpected(absl::StrCat(value));
  }

  bool number_unsigned(uint64_t value) override {
    if (state_ == State::kShape) {
      if (tensor_.shape.size() == kMaxDims) {
        return Fail(
            absl::StrFormat("shape: want at most %d dimensions", kMaxDims));
      }
      if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
        return Fail(
            absl::StrFormat("shape: dimension %d is above 2^63 - 1", value));
      }
      tensor_.shape.push_back(static_cast<int64_t>(value));
      return true;
    }
    if (state_ == State::kOffsets) {
      if (num_offsets_ == 2) return Fail("data_offsets: want 2 entries");
      offsets_[num_offsets_++] = value;
      return true;
    }
    return Unexpected(absl::StrCat(value));
  }

  bool string(std::string& value) override {
    if (state_ == State::kMetadata) return true;
    if (state_ != State::kTensor || key_ != "dtype") {
      return Unexpected("a string");
    }
    if (has_type_) return Fail("has two fields dtype");
    const auto row = std::find_if(
        kTypes.begin(), kTypes.end(),
        [&value](const TypeRow& candidate) { return candidate.name == value; });
    if (row == kTypes.end()) {
      return Fail(absl::StrFormat("unknown dtype \"%s\"", Short(value)));
    }
    tensor_.type = row->type;
    has_type_ = true;
    return true;
  }

  bool start_object(size_t) override {
    if (state_ == State::kStart) {
      state_ = State::kTensors;
      return true;
    }
    if (state_ != State::kTensors) return Unexpected("an object");
    if (key_ == "__metadata__") {
      state_ = State::kMetadata;
      return true;
    }
    state_ = State::kTensor;
    tensor_ = TensorInfo{};
    tensor_.name = key_;
    has_type_ = has_shape_ = has_offsets_ = false;
    num_offsets_ = 0;
    return true;
  }

  bool key(std::string& value) override {
    if (state_ == State::kTensors) {
      tensor_.name = value;  // the name is used in errors
      if (!names_.insert(value).second) return Fail("is defined twice");
    } else if (state_ == State::kTensor && value != "dtype" &&
               value != "shape" && value != "data_offsets") {
      return Fail(absl::StrFormat("unknown field \"%s\"", Short(value)));
    }
    key_ = value;
    return true;
  }

  bool end_object() override {
    if (state_ == State::kTensors) {
      state_ = State::kEnd;
      return true;
    }
    if (state_ == State::kTensor) {
      if (!has_type_ || !has_shape_ || !has_offsets_) {
        return Fail("want dtype, shape and data_offsets");
      }
      tensors_.push_back(std::move(tensor_));
    }
    state_ = State::kTensors;
    return true;
  }

  bool start_array(size_t) override {
    if (state_ == State::kTensor && key_ == "shape" && !has_shape_) {
      state_ = State::kShape;
      has_shape_ = true;
      return true;
    }
    if (state_ == State::kTensor && key_ == "data_offsets" && !has_offsets_) {
      state_ = State::kOffsets;
      has_offsets_ = true;
      return true;
    }
    return Unexpected("an array");
  }

  bool end_array() override {
    if (state_ == State::kOffsets) {
      if (num_offsets_ != 2) return Fail("data_offsets: want 2 entries");
      if (offsets_[1] < offsets_[0]) {
        return Fail(absl::StrFormat("data_offsets: end %d is before begin %d",
                                    offsets_[1], offsets_[0]));
      }
      tensor_.begin_bytes = offsets_[0];
      tensor_.size_bytes = offsets_[1] - offsets_[0];
    }
    state_ = State::kTensor;
    return true;
  }

  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    if (status_.ok()) {
      status_ = absl::InvalidArgumentError(absl::StrFormat(
          "%s: the header is not valid JSON at byte %d", where_, position));
    }
    return false;
  }

 private:
  static std::string Short(std::string_view text) {
    constexpr size_t kMaxLength = 100;
    return std::string(text.substr(0, kMaxLength));
  }
  bool Fail(std::string_view what) {
    status_ = absl::InvalidArgumentError(absl::StrFormat(
        "%s: tensor %s: %s", where_, Short(tensor_.name), what));
    return false;
  }
  bool Unexpected(std::string_view what) {
    if (state_ == State::kStart || state_ == State::kEnd) {
      status_ = absl::InvalidArgumentError(absl::StrFormat(
          "%s: the header must be a JSON object, but begins with %s", where_,
          Short(what)));
      return false;
    }
    return Fail(absl::StrFormat("%s: unexpected %s", Short(key_), Short(what)));
  }

  std::string_view where_;
  absl::Status status_;
  State state_ = State::kStart;
  std::string key_;
  std::set<std::string> names_;
  TensorInfo tensor_;
  bool has_type_ = false;
  bool has_shape_ = false;
  bool has_offsets_ = false;
  std::array<uint64_t, 2> offsets_ = {};
  size_t num_offsets_ = 0;
  std::vector<TensorInfo> tensors_;
};

// Returns the bytes that a tensor of this shape and type takes. Returns nullopt
// if their number overflows, or if the elements do not fill whole bytes.
std::optional<uint64_t> BytesOfShape(const TensorInfo& tensor) {
  uint64_t bits = static_cast<uint64_t>(TensorTypeBits(tensor.type));
  // A zero in the shape makes the tensor empty, even if the product of the
  // other entries would overflow.
  if (std::find(tensor.shape.begin(), tensor.shape.end(), 0) !=
      tensor.shape.end()) {
    return 0;
  }
  for (const int64_t dim : tensor.shape) {
    if (__builtin_mul_overflow(bits, static_cast<uint64_t>(dim), &bits)) {
      return std::nullopt;
    }
  }
  if (bits % 8 != 0) return std::nullopt;
  return bits / 8;
}

absl::Status CheckLayout(const std::vector<TensorInfo>& tensors,
                         uint64_t data_bytes, std::string_view where) {
  uint64_t expected_begin = 0;
  for (const TensorInfo& tensor : tensors) {
    const auto fail = [&](std::string_view what) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: tensor %s: %s", where, tensor.name, what));
    };
    const std::optional<uint64_t> want = BytesOfShape(tensor);
    if (!want.has_value()) {
      return fail(absl::StrFormat(
          "shape %s of %s is not a whole number of bytes, or is 2^61 bytes or "
          "more",
          ShapeText(tensor.shape), TensorTypeName(tensor.type)));
    }
    if (*want != tensor.size_bytes) {
      return fail(absl::StrFormat(
          "shape %s of %s takes %d bytes, but data_offsets give %d",
          ShapeText(tensor.shape), TensorTypeName(tensor.type), *want,
          tensor.size_bytes));
    }
    const uint64_t end = tensor.begin_bytes + tensor.size_bytes;
    if (end > data_bytes) {
      return fail(absl::StrFormat(
          "data_offsets end at %d, but the file's data has %d bytes", end,
          data_bytes));
    }
    if (tensor.begin_bytes != expected_begin) {
      return fail(absl::StrFormat(
          "data_offsets begin at %d, want %d: tensors must not overlap nor "
          "leave holes",
          tensor.begin_bytes, expected_begin));
    }
    expected_begin = end;
  }
  if (expected_begin != data_bytes) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: the tensors cover %d bytes, but the data after the header has "
        "%d bytes",
        where, expected_begin, data_bytes));
  }
  return absl::OkStatus();
}

}  // namespace

std::string_view TensorTypeName(TensorType type) { return RowOf(type).name; }
int64_t TensorTypeBits(TensorType type) { return RowOf(type).bits; }

bool IsWeightType(TensorType type) {
  return type == TensorType::kF32 || type == TensorType::kF16 ||
         type == TensorType::kBF16;
}

std::string ShapeText(std::span<const int64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

uint64_t TensorInfo::row_bytes() const {
  const uint64_t count = static_cast<uint64_t>(num_rows());
  return count == 0 ? 0 : size_bytes / count;
}

absl::StatusOr<std::vector<TensorInfo>> ParseSafetensorsHeader(
    std::string_view text, uint64_t data_bytes, std::string_view where) {
  HeaderHandler handler(where);
  try {
    if (!json::sax_parse(text.begin(), text.end(), &handler)) {
      if (!handler.status().ok()) return handler.status();
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: the header is not valid JSON", where));
    }
  } catch (const std::exception& error) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: header: %s", where, error.what()));
  }
  std::vector<TensorInfo> tensors = handler.TakeTensors();
  // An empty tensor has the same offset as the tensor that follows it, so empty
  // tensors are sorted before others at an equal offset.
  std::sort(tensors.begin(), tensors.end(),
            [](const TensorInfo& a, const TensorInfo& b) {
              return std::pair(a.begin_bytes, a.size_bytes) <
                     std::pair(b.begin_bytes, b.size_bytes);
            });
  KVASIR_RETURN_IF_ERROR(CheckLayout(tensors, data_bytes, where));
  return tensors;
}

}  // namespace kvasir::model
