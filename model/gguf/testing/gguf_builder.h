// Writes GGUF files for tests.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "model/gguf/gguf_header.h"

namespace kvasir::model {

// Appends the bytes of a number.
template <typename T>
void AppendNumber(T value, std::string* out) {
  char bytes[sizeof(T)];
  std::memcpy(bytes, &value, sizeof(T));
  out->append(bytes, sizeof(T));
}

class GgufBuilder {
 public:
  // Adds a key whose value is given as the bytes that the file stores.
  GgufBuilder& Raw(std::string_view key, GgufType type,
                   const std::string& bytes) {
    ++num_keys_;
    AppendText(key, &keys_);
    AppendNumber(static_cast<uint32_t>(type), &keys_);
    keys_ += bytes;
    return *this;
  }
  GgufBuilder& U32(std::string_view key, uint32_t value) {
    return Scalar(key, GgufType::kU32, value);
  }
  GgufBuilder& F32(std::string_view key, float value) {
    return Scalar(key, GgufType::kF32, value);
  }
  GgufBuilder& Bool(std::string_view key, bool value) {
    return Scalar(key, GgufType::kBool, static_cast<uint8_t>(value));
  }
  GgufBuilder& String(std::string_view key, std::string_view value) {
    std::string bytes;
    AppendText(value, &bytes);
    return Raw(key, GgufType::kString, bytes);
  }
  GgufBuilder& Strings(std::string_view key,
                       const std::vector<std::string>& values) {
    std::string bytes;
    for (const std::string& value : values) AppendText(value, &bytes);
    return Array(key, GgufType::kString, values.size(), bytes);
  }
  GgufBuilder& I32s(std::string_view key, const std::vector<int32_t>& values) {
    std::string bytes;
    for (const int32_t value : values) AppendNumber(value, &bytes);
    return Array(key, GgufType::kI32, values.size(), bytes);
  }
  GgufBuilder& F32s(std::string_view key, const std::vector<float>& values) {
    std::string bytes;
    for (const float value : values) AppendNumber(value, &bytes);
    return Array(key, GgufType::kF32, values.size(), bytes);
  }
  GgufBuilder& Array(std::string_view key, GgufType type, uint64_t count,
                     const std::string& elements) {
    std::string bytes;
    AppendNumber(static_cast<uint32_t>(type), &bytes);
    AppendNumber(count, &bytes);
    return Raw(key, GgufType::kArray, bytes + elements);
  }
  // `dims` is innermost first, as in the file.
  GgufBuilder& Tensor(std::string_view name, const std::vector<uint64_t>& dims,
                      uint32_t type, const std::string& data) {
    data_.resize((data_.size() + 31) / 32 * 32);
    TensorAt(name, dims, type, data_.size());
    data_ += data;
    return *this;
  }
  // Adds only the entry in the list of tensors, without data.
  GgufBuilder& TensorAt(std::string_view name,
                        const std::vector<uint64_t>& dims, uint32_t type,
                        uint64_t offset) {
    ++num_tensors_;
    AppendText(name, &tensors_);
    AppendNumber(static_cast<uint32_t>(dims.size()), &tensors_);
    for (const uint64_t dim : dims) AppendNumber(dim, &tensors_);
    AppendNumber(type, &tensors_);
    AppendNumber(offset, &tensors_);
    return *this;
  }

  std::string Build(uint32_t version = 3) const {
    std::string file = "GGUF";
    AppendNumber(version, &file);
    AppendNumber(num_tensors_, &file);
    AppendNumber(num_keys_, &file);
    file += keys_;
    file += tensors_;
    file.resize((file.size() + 31) / 32 * 32);
    return file + data_;
  }

 private:
  template <typename T>
  GgufBuilder& Scalar(std::string_view key, GgufType type, T value) {
    std::string bytes;
    AppendNumber(value, &bytes);
    return Raw(key, type, bytes);
  }
  static void AppendText(std::string_view text, std::string* out) {
    AppendNumber(uint64_t{text.size()}, out);
    out->append(text);
  }

  uint64_t num_keys_ = 0;
  uint64_t num_tensors_ = 0;
  std::string keys_;
  std::string tensors_;
  std::string data_;
};

}  // namespace kvasir::model
