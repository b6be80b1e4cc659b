// Reader of safetensors files: one file, or a folder of shards with an index.
// Nothing in a file is believed before it is checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "model/file.h"

namespace kvasir::model {

// Every type the format knows. Weights are F32, F16 or BF16; the others are
// read as headers only.
enum class TensorType {
  kF32,
  kF16,
  kBF16,
  kF64,
  kI64,
  kI32,
  kI16,
  kI8,
  kU64,
  kU32,
  kU16,
  kU8,
  kBool,
  kF8E4M3,
  kF8E5M2,
  kF8E8M0,
  kF6E2M3,
  kF6E3M2,
  kF4,
  kC64,
};

std::string_view TensorTypeName(TensorType type);
int64_t TensorTypeBits(TensorType type);
bool IsWeightType(TensorType type);
std::string ShapeText(std::span<const int64_t> shape);

struct TensorInfo {
  std::string name;
  TensorType type = TensorType::kF32;
  std::vector<int64_t> shape;  // outermost first
  // From the start of the file's data section.
  uint64_t begin_bytes = 0;
  uint64_t size_bytes = 0;

  // Product of the shape but its first entry, in bytes; the unit of reading.
  // Only for weight types.
  uint64_t row_bytes() const;
  // The first entry of the shape; 1 for a scalar.
  int64_t num_rows() const { return shape.empty() ? 1 : shape[0]; }
};

// A header as text, checked against the bytes that follow it: types known,
// offsets in order, without overlap or hole, each size the product of its
// shape. `where` names the file in errors. Sorted by offset.
absl::StatusOr<std::vector<TensorInfo>> ParseSafetensorsHeader(
    std::string_view json, uint64_t data_bytes, std::string_view where);

// One file. Threads: const methods from any thread.
class SafetensorsFile {
 public:
  static absl::StatusOr<SafetensorsFile> Open(const std::string& path);

  const std::string& path() const { return file_.path(); }
  const std::vector<TensorInfo>& tensors() const { return tensors_; }

  // Bytes of a tensor of this file, `offset_bytes` from its start.
  absl::Status Read(const TensorInfo& tensor, uint64_t offset_bytes,
                    std::span<std::byte> out) const;
  void WillNeed(const TensorInfo& tensor, uint64_t offset_bytes,
                uint64_t size_bytes) const;
  void Release(const TensorInfo& tensor, uint64_t offset_bytes,
               uint64_t size_bytes) const;

 private:
  SafetensorsFile(RandomAccessFile file, uint64_t data_start_bytes,
                  std::vector<TensorInfo> tensors)
      : file_(std::move(file)),
        data_start_bytes_(data_start_bytes),
        tensors_(std::move(tensors)) {}

  RandomAccessFile file_;
  uint64_t data_start_bytes_;
  std::vector<TensorInfo> tensors_;
};

// The tensors of a checkpoint folder, by name, wherever they lie:
// model.safetensors, or the shards of model.safetensors.index.json.
// Threads: const methods from any thread.
// Errors: NOT_FOUND for a folder without either file.
class TensorStore {
 public:
  struct Entry {
    const SafetensorsFile* file = nullptr;
    const TensorInfo* info = nullptr;
  };

  static absl::StatusOr<TensorStore> Open(const std::string& folder);

  // nullptr when there is none. Valid as long as the store.
  const Entry* Find(std::string_view name) const;
  const std::map<std::string, Entry, std::less<>>& entries() const {
    return entries_;
  }

 private:
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, Entry, std::less<>> entries_;
};

}  // namespace kvasir::model
