#include "router/facades/kserve/tensors.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"

namespace kvasir::router {
namespace {

using Input = inference::ModelInferRequest::InferInputTensor;

// The largest number of elements of a tensor: far more than any prompt has, but
// so few that their number of bytes cannot overflow.
constexpr int64_t kMaxElements = int64_t{1} << 30;
constexpr size_t kBytesLengthPrefix = 4;

absl::Status TensorError(const Input& input, const std::string& what) {
  return absl::InvalidArgumentError(
      absl::StrCat("tensor '", input.name(), "': ", what));
}

// Returns the size of an element in bytes; 0 for BYTES, whose elements have
// different sizes; nullopt for an unsupported datatype.
std::optional<size_t> ElementBytes(const std::string& datatype) {
  if (datatype == "BOOL" || datatype == "INT8" || datatype == "UINT8") return 1;
  if (datatype == "INT16" || datatype == "UINT16") return 2;
  if (datatype == "INT32" || datatype == "UINT32" || datatype == "FP32") {
    return 4;
  }
  if (datatype == "INT64" || datatype == "UINT64" || datatype == "FP64") {
    return 8;
  }
  if (datatype == "BYTES") return 0;
  return std::nullopt;
}

absl::StatusOr<int64_t> CountElements(const Input& input) {
  int64_t count = 1;
  for (const int64_t dim : input.shape()) {
    if (dim < 0 || dim > kMaxElements || count * dim > kMaxElements) {
      return TensorError(
          input, absl::StrCat("shape ", ShapeText(input),
                              ": want dimensions of 0 or more and at most ",
                              kMaxElements, " elements"));
    }
    count *= dim;
  }
  return count;
}

bool IsInteger(const std::string& datatype) {
  return datatype != "BOOL" && datatype != "BYTES" && datatype != "FP32" &&
         datatype != "FP64";
}

// Returns the number of values in the tensor's typed contents.
int64_t ContentsSize(const Input& input) {
  const inference::InferTensorContents& contents = input.contents();
  const std::string& type = input.datatype();
  if (type == "BOOL") return contents.bool_contents_size();
  if (type == "INT8" || type == "INT16" || type == "INT32") {
    return contents.int_contents_size();
  }
  if (type == "UINT8" || type == "UINT16" || type == "UINT32") {
    return contents.uint_contents_size();
  }
  if (type == "INT64") return contents.int64_contents_size();
  if (type == "UINT64") return contents.uint64_contents_size();
  if (type == "FP32") return contents.fp32_contents_size();
  if (type == "FP64") return contents.fp64_contents_size();
  return contents.bytes_contents_size();
}

absl::Status CheckParameters(const Input& input) {
  for (const auto& [name, value] : input.parameters()) {
    return absl::UnimplementedError(absl::StrCat("tensor '", input.name(),
                                                 "': parameter '", name,
                                                 "' is not implemented"));
  }
  return absl::OkStatus();
}

absl::Status CheckSize(const Input& input, const std::string* raw,
                       int64_t num_elements) {
  const std::optional<size_t> element_bytes = ElementBytes(input.datatype());
  if (!element_bytes) {
    return TensorError(input,
                       absl::StrCat("datatype '", input.datatype(),
                                    "': want BOOL, BYTES, FP32, FP64 or an "
                                    "integer type"));
  }
  if (raw == nullptr) {
    if (ContentsSize(input) != num_elements) {
      return TensorError(
          input,
          absl::StrCat("shape ", ShapeText(input), " ", input.datatype(),
                       ": want ", num_elements, " values in contents, have ",
                       ContentsSize(input)));
    }
    return absl::OkStatus();
  }
  const size_t count = static_cast<size_t>(num_elements);
  // Every string begins with a 4-byte length, so the number of bytes limits the
  // number of strings.
  if (*element_bytes == 0 && raw->size() < count * kBytesLengthPrefix) {
    return TensorError(input, absl::StrCat("shape ", ShapeText(input),
                                           " BYTES: want at least ",
                                           count * kBytesLengthPrefix,
                                           " raw bytes, have ", raw->size()));
  }
  if (*element_bytes > 0 && raw->size() != count * *element_bytes) {
    return TensorError(
        input, absl::StrCat("shape ", ShapeText(input), " ", input.datatype(),
                            ": want ", count * *element_bytes,
                            " raw bytes, have ", raw->size()));
  }
  return absl::OkStatus();
}

template <typename T>
T LoadElement(const std::string& raw, int64_t index) {
  T value;
  std::memcpy(&value, raw.data() + static_cast<size_t>(index) * sizeof(T),
              sizeof(T));
  return value;
}

template <typename T>
void AppendRaw(const std::string& raw, int64_t count,
               std::vector<int64_t>* out) {
  for (int64_t i = 0; i < count; ++i) {
    out->push_back(static_cast<int64_t>(LoadElement<T>(raw, i)));
  }
}

// UINT64 values that do not fit into int64 become negative. They are not
// refused, because seeds use all 64 bits.
void RawInts(const std::string& type, const std::string& raw, int64_t count,
             std::vector<int64_t>* out) {
  if (type == "INT8")
    AppendRaw<int8_t>(raw, count, out);
  else if (type == "UINT8")
    AppendRaw<uint8_t>(raw, count, out);
  else if (type == "INT16")
    AppendRaw<int16_t>(raw, count, out);
  else if (type == "UINT16")
    AppendRaw<uint16_t>(raw, count, out);
  else if (type == "INT32")
    AppendRaw<int32_t>(raw, count, out);
  else if (type == "UINT32")
    AppendRaw<uint32_t>(raw, count, out);
  else if (type == "INT64")
    AppendRaw<int64_t>(raw, count, out);
  else if (type == "UINT64")
    AppendRaw<uint64_t>(raw, count, out);
}

void TypedInts(const std::string& type,
               const inference::InferTensorContents& contents,
               std::vector<int64_t>* out) {
  if (type == "INT8" || type == "INT16" || type == "INT32") {
    out->assign(contents.int_contents().begin(), contents.int_contents().end());
  } else if (type == "UINT8" || type == "UINT16" || type == "UINT32") {
    out->assign(contents.uint_contents().begin(),
                contents.uint_contents().end());
  } else if (type == "INT64") {
    out->assign(contents.int64_contents().begin(),
                contents.int64_contents().end());
  } else if (type == "UINT64") {
    for (const uint64_t value : contents.uint64_contents()) {
      out->push_back(static_cast<int64_t>(value));
    }
  }
}

absl::Status WrongType(const Input& input, const std::string& want) {
  return TensorError(
      input, absl::StrCat("want datatype ", want, ", have ", input.datatype()));
}

}  // namespace

std::string ShapeText(const Input& input) {
  return absl::StrCat("[", absl::StrJoin(input.shape(), ", "), "]");
}

absl::StatusOr<KserveTensors> KserveTensors::Create(
    const inference::ModelInferRequest& request) {
  const bool raw = request.raw_input_contents_size() > 0;
  if (raw && request.raw_input_contents_size() != request.inputs_size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("raw_input_contents: want one entry for each of the ",
                     request.inputs_size(), " inputs, have ",
                     request.raw_input_contents_size()));
  }
  KserveTensors tensors;
  for (int i = 0; i < request.inputs_size(); ++i) {
    const Input& input = request.inputs(i);
    if (!tensors.index_by_name_.emplace(input.name(), static_cast<size_t>(i))
             .second) {
      return TensorError(input, "given twice; send it once");
    }
    KVASIR_RETURN_IF_ERROR(CheckParameters(input));
    if (raw && input.has_contents()) {
      return TensorError(input,
                         "has contents although raw_input_contents is used");
    }
    Tensor tensor;
    tensor.input = &input;
    tensor.raw = raw ? &request.raw_input_contents(i) : nullptr;
    KVASIR_ASSIGN_OR_RETURN(tensor.num_elements, CountElements(input));
    KVASIR_RETURN_IF_ERROR(CheckSize(input, tensor.raw, tensor.num_elements));
    tensors.tensors_.push_back(tensor);
  }
  return tensors;
}

const KserveTensors::Tensor* KserveTensors::Find(
    const std::string& name) const {
  const auto found = index_by_name_.find(name);
  return found == index_by_name_.end() ? nullptr : &tensors_[found->second];
}

KserveTensors::Tensor* KserveTensors::Read(const std::string& name) {
  const auto found = index_by_name_.find(name);
  if (found == index_by_name_.end()) return nullptr;
  Tensor& tensor = tensors_[found->second];
  tensor.read = true;
  return &tensor;
}

absl::Status KserveTensors::CheckScalar(const Tensor& tensor) {
  if (tensor.num_elements == 1) return absl::OkStatus();
  return TensorError(*tensor.input,
                     absl::StrCat("want one value (shape [], [1] or [1, 1]), "
                                  "have shape ",
                                  ShapeText(*tensor.input)));
}

absl::Status KserveTensors::CheckVector(const Tensor& tensor) {
  const Input& input = *tensor.input;
  const int rank = input.shape_size();
  if (rank <= 1 || (rank == 2 && input.shape(0) == 1)) return absl::OkStatus();
  return TensorError(
      input, absl::StrCat("want shape [n] or [1, n], have ", ShapeText(input)));
}

absl::StatusOr<std::vector<int64_t>> KserveTensors::DecodeInts(
    const Tensor& tensor) {
  const Input& input = *tensor.input;
  const std::string& type = input.datatype();
  if (!IsInteger(type)) {
    return WrongType(input, "INT32 (or another integer type)");
  }
  std::vector<int64_t> values;
  // This allocates at most a few times the request's size, because the number
  // of elements was checked against the bytes.
  values.reserve(static_cast<size_t>(tensor.num_elements));
  if (tensor.raw != nullptr) {
    RawInts(type, *tensor.raw, tensor.num_elements, &values);
  } else {
    TypedInts(type, input.contents(), &values);
  }
  return values;
}

absl::StatusOr<std::vector<double>> KserveTensors::DecodeFloats(
    const Tensor& tensor) {
  const Input& input = *tensor.input;
  std::vector<double> values;
  if (input.datatype() == "FP32") {
    for (int64_t i = 0; i < tensor.num_elements; ++i) {
      values.push_back(static_cast<double>(
          tensor.raw != nullptr
              ? LoadElement<float>(*tensor.raw, i)
              : input.contents().fp32_contents(static_cast<int>(i))));
    }
  } else if (input.datatype() == "FP64") {
    for (int64_t i = 0; i < tensor.num_elements; ++i) {
      values.push_back(
          tensor.raw != nullptr
              ? LoadElement<double>(*tensor.raw, i)
              : input.contents().fp64_contents(static_cast<int>(i)));
    }
  } else {
    if (input.datatype() == "BYTES" || input.datatype() == "BOOL") {
      return WrongType(input, "FP32");
    }
    KVASIR_ASSIGN_OR_RETURN(const std::vector<int64_t> integers,
                            DecodeInts(tensor));
    values.assign(integers.begin(), integers.end());
  }
  return values;
}

absl::StatusOr<std::vector<std::string>> KserveTensors::DecodeStrings(
    const Tensor& tensor) {
  const Input& input = *tensor.input;
  if (input.datatype() != "BYTES") return WrongType(input, "BYTES");
  if (tensor.raw == nullptr) {
    return std::vector<std::string>(input.contents().bytes_contents().begin(),
                                    input.contents().bytes_contents().end());
  }
  const std::string& raw = *tensor.raw;
  std::vector<std::string> values;
  size_t at = 0;
  while (at < raw.size()) {
    if (raw.size() - at < kBytesLengthPrefix) {
      return TensorError(
          input, absl::StrCat("element ", values.size(), " at raw byte ", at,
                              ": no room for its 4-byte length, "
                              "have ",
                              raw.size() - at, " bytes"));
    }
    uint32_t length = 0;
    std::memcpy(&length, raw.data() + at, sizeof(length));
    at += kBytesLengthPrefix;
    if (length > raw.size() - at) {
      return TensorError(
          input,
          absl::StrCat("element ", values.size(), " at raw byte ", at,
                       ": want ", length, " bytes, have ", raw.size() - at));
    }
    values.push_back(raw.substr(at, length));
    at += length;
  }
  // More strings than in the shape are accepted, because some clients send
  // several strings with the shape [1, 1].
  if (static_cast<int64_t>(values.size()) < tensor.num_elements) {
    return TensorError(input, absl::StrCat("shape ", ShapeText(input),
                                           ": want ", tensor.num_elements,
                                           " elements, have ", values.size()));
  }
  return values;
}

absl::StatusOr<std::optional<bool>> KserveTensors::Bool(
    const std::string& name) {
  Tensor* tensor = Read(name);
  if (tensor == nullptr) return std::optional<bool>();
  if (tensor->input->datatype() != "BOOL") {
    return WrongType(*tensor->input, "BOOL");
  }
  KVASIR_RETURN_IF_ERROR(CheckScalar(*tensor));
  return std::optional<bool>(tensor->raw != nullptr
                                 ? (*tensor->raw)[0] != '\0'
                                 : tensor->input->contents().bool_contents(0));
}

absl::StatusOr<std::optional<int64_t>> KserveTensors::Int(
    const std::string& name) {
  Tensor* tensor = Read(name);
  if (tensor == nullptr) return std::optional<int64_t>();
  KVASIR_RETURN_IF_ERROR(CheckScalar(*tensor));
  KVASIR_ASSIGN_OR_RETURN(const std::vector<int64_t> values,
                          DecodeInts(*tensor));
  return std::optional<int64_t>(values[0]);
}

absl::StatusOr<std::optional<double>> KserveTensors::Float(
    const std::string& name) {
  Tensor* tensor = Read(name);
  if (tensor == nullptr) return std::optional<double>();
  KVASIR_RETURN_IF_ERROR(CheckScalar(*tensor));
  KVASIR_ASSIGN_OR_RETURN(const std::vector<double> values,
                          DecodeFloats(*tensor));
  if (!std::isfinite(values[0])) {
    return TensorError(*tensor->input, absl::StrCat("want a finite number, "
                                                    "have ",
                                                    values[0]));
  }
  return std::optional<double>(values[0]);
}

absl::StatusOr<std::optional<std::string>> KserveTensors::String(
    const std::string& name) {
  Tensor* tensor = Read(name);
  if (tensor == nullptr) return std::optional<std::string>();
  KVASIR_RETURN_IF_ERROR(CheckScalar(*tensor));
  KVASIR_ASSIGN_OR_RETURN(std::vector<std::string> values,
                          DecodeStrings(*tensor));
  if (values.size() != 1) {
    return TensorError(*tensor->input,
                       absl::StrCat("want 1 element, have ", values.size()));
  }
  return std::optional<std::string>(std::move(values[0]));
}

absl::StatusOr<std::vector<std::string>> KserveTensors::Strings(
    const std::string& name) {
  Tensor* tensor = Read(name);
  if (tensor == nullptr) return std::vector<std::string>();
  KVASIR_RETURN_IF_ERROR(CheckVector(*tensor));
  return DecodeStrings(*tensor);
}

int64_t KserveTensors::NumElements(const std::string& name) const {
  const Tensor* const tensor = Find(name);
  return tensor == nullptr ? 0 : tensor->num_elements;
}

absl::StatusOr<proto::TokenBytes> KserveTensors::TokenIds(
    const std::string& name, int64_t count) {
  Tensor* const tensor = Read(name);
  if (tensor == nullptr) return proto::TokenBytes();
  KVASIR_RETURN_IF_ERROR(CheckVector(*tensor));
  const auto wrong = [tensor](int64_t id) {
    return TensorError(*tensor->input,
                       absl::StrCat("want token ids of 0 or more, have ", id));
  };
  const auto size = static_cast<size_t>(count);
  if (tensor->raw != nullptr && tensor->input->datatype() == "INT32") {
    KVASIR_ASSIGN_OR_RETURN(proto::TokenBytes ids,
                            proto::TokenBytes::FromBytes(tensor->raw->substr(
                                0, size * proto::kBytesPerTokenId)));
    for (size_t i = 0; i < size; ++i) {
      if (ids[i] < 0) return wrong(ids[i]);
    }
    return ids;
  }
  KVASIR_ASSIGN_OR_RETURN(const std::vector<int64_t> values,
                          DecodeInts(*tensor));
  std::vector<int32_t> ids(size);
  for (size_t i = 0; i < size; ++i) {
    if (values[i] < 0 || values[i] > std::numeric_limits<int32_t>::max()) {
      return wrong(values[i]);
    }
    ids[i] = static_cast<int32_t>(values[i]);
  }
  return proto::TokenBytes::Adopt(std::move(ids));
}

absl::StatusOr<std::vector<std::vector<int64_t>>> KserveTensors::TwoRows(
    const std::string& name) {
  Tensor* tensor = Read(name);
  if (tensor == nullptr) return std::vector<std::vector<int64_t>>();
  const Input& input = *tensor->input;
  const int rank = input.shape_size();
  const bool batched = rank == 3 && input.shape(0) == 1 && input.shape(1) == 2;
  if (!batched && !(rank == 2 && input.shape(0) == 2)) {
    return TensorError(input, absl::StrCat("want shape [2, n] or [1, 2, n], "
                                           "have ",
                                           ShapeText(input)));
  }
  KVASIR_ASSIGN_OR_RETURN(const std::vector<int64_t> values,
                          DecodeInts(*tensor));
  const auto middle =
      values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  return std::vector<std::vector<int64_t>>{{values.begin(), middle},
                                           {middle, values.end()}};
}

std::vector<std::string> KserveTensors::Unread() const {
  std::vector<std::string> names;
  for (const Tensor& tensor : tensors_) {
    if (!tensor.read) names.push_back(tensor.input->name());
  }
  return names;
}

}  // namespace kvasir::router
