// Reads the header of a GGUF file: its metadata and its list of tensors
// (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), versions 2 and
// 3, little-endian. Everything in a file is checked before it is used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "model/files/file.h"
#include "model/gguf/gguf_blocks.h"

namespace kvasir::model {

// The enumerators have the numbers of the file format.
enum class GgufType : uint32_t {
  kU8 = 0,
  kI8 = 1,
  kU16 = 2,
  kI16 = 3,
  kU32 = 4,
  kI32 = 5,
  kF32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kU64 = 10,
  kI64 = 11,
  kF64 = 12,
};

// One value of the metadata.
struct GgufValue {
  GgufType type = GgufType::kU8;  // for an array: the type of its elements
  bool is_array = false;
  uint64_t count = 1;
  // The elements as they are stored. Each string is preceded by its length.
  std::string_view bytes;
};

struct GgufTensor {
  std::string name;
  size_t file = 0;  // the file that has the data, counted from 0
  const GgmlType* type = nullptr;
  std::vector<int64_t> shape;  // outermost first, as elsewhere in this folder
  uint64_t begin_bytes = 0;    // offset from the start of its file
  uint64_t size_bytes = 0;

  int64_t num_elements() const;
};

// Owns: the bytes of the header.
// Threads: const methods may be called from any thread.
// Errors: all name the file and the key or the tensor, and state the value
//   found and the values allowed. INVALID_ARGUMENT for a broken file or a value
//   of a wrong type, DATA_LOSS for a truncated file, UNIMPLEMENTED for a
//   version, byte order or tensor type that is not supported,
//   RESOURCE_EXHAUSTED for a header above the limits.
class GgufHeader {
 public:
  static constexpr uint64_t kMaxHeaderBytes = uint64_t{256} << 20;
  static constexpr uint64_t kMaxKeys = 1 << 16;
  static constexpr uint64_t kMaxTensors = 1 << 16;

  // Reads the part of the file that the header needs.
  static absl::StatusOr<GgufHeader> Read(const RandomAccessFile& file);
  static absl::StatusOr<GgufHeader> Open(const std::string& path);
  // Parses the beginning of a file of `file_bytes` bytes. `where` names the
  // file in errors. OUT_OF_RANGE if the header goes beyond `text`.
  static absl::StatusOr<GgufHeader> Parse(std::string_view text,
                                          uint64_t file_bytes,
                                          const std::string& where);

  GgufHeader(GgufHeader&&) = default;
  GgufHeader& operator=(GgufHeader&&) = default;
  GgufHeader(const GgufHeader&) = delete;
  GgufHeader& operator=(const GgufHeader&) = delete;

  const std::string& where() const { return where_; }
  // In the order of the file. Read has checked that they lie inside the file
  // and do not overlap.
  const std::vector<GgufTensor>& tensors() const { return tensors_; }
  const GgufTensor* FindTensor(std::string_view name) const;

  // Adds the tensors of the next file of the same model. INVALID_ARGUMENT if a
  // tensor is in both, RESOURCE_EXHAUSTED above kMaxTensors.
  absl::Status Append(const GgufHeader& next);

  // All keys, sorted by their texts.
  const std::map<std::string_view, GgufValue>& values() const {
    return values_;
  }
  // nullptr if the file does not have the key.
  const GgufValue* Find(std::string_view key) const;

  // Each returns nullopt if the key is missing, and INVALID_ARGUMENT if its
  // value has another type. Int accepts every integer type, and Number also
  // both floating-point types. Number returns ShortestDecimal of a float32.
  absl::StatusOr<std::optional<int64_t>> Int(std::string_view key) const;
  absl::StatusOr<std::optional<double>> Number(std::string_view key) const;
  absl::StatusOr<std::optional<bool>> Bool(std::string_view key) const;
  absl::StatusOr<std::optional<std::string_view>> String(
      std::string_view key) const;
  // Each returns an empty list if the key is missing. The strings are views
  // into this object.
  absl::StatusOr<std::vector<std::string_view>> Strings(
      std::string_view key) const;
  absl::StatusOr<std::vector<int64_t>> Ints(std::string_view key) const;
  absl::StatusOr<std::vector<float>> Floats(std::string_view key) const;

  // Both make an error with the text "FILE: KEY: what". Error returns
  // INVALID_ARGUMENT. Unserved returns UNIMPLEMENTED, for a value that is valid
  // but not supported.
  absl::Status Error(std::string_view key, std::string_view what) const;
  absl::Status Unserved(std::string_view key, std::string_view what) const;

 private:
  friend class GgufHeaderReader;

  GgufHeader() = default;
  static absl::StatusOr<GgufHeader> ParseOwned(std::vector<char> text,
                                               uint64_t file_bytes,
                                               const std::string& where);

  absl::Status TypeError(std::string_view key, std::string_view want,
                         const GgufValue& have) const;

  std::string where_;
  std::vector<char> text_;  // values_ points into it
  std::map<std::string_view, GgufValue> values_;
  std::vector<GgufTensor> tensors_;
  std::map<std::string, size_t, std::less<>> tensor_places_;
  size_t num_files_ = 1;
};

// Returns the shortest decimal number that rounds to `value`, as a double. Most
// float32 values in a GGUF file were decimals in config.json, such as 1e-05,
// and this restores them.
double ShortestDecimal(float value);

// True if `path` is a regular file. GGUF is the only checkpoint format that is
// not a folder.
bool MayBeGguf(const std::string& path);

}  // namespace kvasir::model
