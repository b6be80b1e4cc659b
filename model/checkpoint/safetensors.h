// Reads safetensors files: one file, or a folder of shards with an index.
// Everything in a file is checked before it is used. Files of other formats
// (gguf_tensors.h) are read through the same interface.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "model/files/file.h"

namespace kvasir::model {

// Every type of the format. Weights are F32, F16 or BF16. Tensors of other
// types are not loaded.
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

// Selects rows of a tensor: blocks of `block_rows` rows each. The first block
// begins at row `first`, and each further block begins `stride` rows after the
// one before. If block_rows is 0, all rows are selected.
struct RowBlocks {
  int64_t first = 0;
  int64_t block_rows = 0;
  int64_t stride = 0;

  bool all() const { return block_rows == 0; }
  friend bool operator==(const RowBlocks&, const RowBlocks&) = default;
};

struct TensorInfo {
  std::string name;  // as stored
  TensorType type = TensorType::kF32;
  std::vector<int64_t> shape;  // outermost first
  // begin_bytes counts from the start of the file's data section.
  uint64_t begin_bytes = 0;
  uint64_t size_bytes = 0;
  // Selects the rows that belong to this tensor; row 0 begins at begin_bytes.
  // If not all rows are selected, `shape` and `size_bytes` describe only the
  // selected rows, which are read as if they were contiguous.
  RowBlocks rows;

  // The bytes of one row: the product of all entries of the shape except the
  // first, times the element size. A row is the smallest unit that is read.
  // Must be called only for weight types.
  uint64_t row_bytes() const;
  // The first entry of the shape. 1 for a scalar.
  int64_t num_rows() const { return shape.empty() ? 1 : shape[0]; }
};

// Parses a header. Checks that types are known, that tensors cover
// `data_bytes` bytes without overlap or gap, and that the size of each
// tensor follows from its shape and type. `where` names the file in errors.
// The result is sorted by offset.
absl::StatusOr<std::vector<TensorInfo>> ParseSafetensorsHeader(
    std::string_view json, uint64_t data_bytes, std::string_view where);

// One open file with tensors.
// Threads: const methods may be called from any thread.
class TensorFile {
 public:
  virtual ~TensorFile() = default;

  const std::string& path() const { return file_.path(); }
  const std::vector<TensorInfo>& tensors() const { return tensors_; }

  // Distinguishes this file from another one of the same name: a 128-bit hash,
  // as hex, of its size and of pieces spread evenly over it. A file below 16
  // MiB is hashed completely; of a larger file, 16 MiB are hashed. A model that
  // was trained further differs in every piece, but a change of a single tensor
  // may stay unnoticed.
  absl::StatusOr<std::string> Fingerprint() const;

  // Fills `out` with bytes of `tensor`, which must be a tensor of this
  // file, from `offset_bytes` on. If `tensor` selects rows, offsets count
  // only their bytes.
  absl::Status Read(const TensorInfo& tensor, uint64_t offset_bytes,
                    std::span<std::byte> out) const;
  void WillNeed(const TensorInfo& tensor, uint64_t offset_bytes,
                uint64_t size_bytes) const;
  void Release(const TensorInfo& tensor, uint64_t offset_bytes,
               uint64_t size_bytes) const;

 protected:
  struct FileRange {
    uint64_t begin_bytes = 0;
    uint64_t size_bytes = 0;
  };

  TensorFile(TensorFile&&) = default;
  TensorFile(RandomAccessFile file, std::vector<TensorInfo> tensors)
      : file_(std::move(file)), tensors_(std::move(tensors)) {}

  const RandomAccessFile& file() const { return file_; }

  // Fills `out` with bytes of the stored tensor from `offset_bytes` on. Here
  // `tensor.rows` has no effect. The caller ensures that the bytes lie inside
  // the stored tensor.
  virtual absl::Status ReadWhole(const TensorInfo& tensor,
                                 uint64_t offset_bytes,
                                 std::span<std::byte> out) const = 0;
  // Returns the part of the file from which ReadWhole would read these bytes.
  virtual FileRange RangeOf(const TensorInfo& tensor, uint64_t offset_bytes,
                            uint64_t size_bytes) const = 0;

 private:
  // Calls piece(offset in the whole tensor, number of bytes, offset in the
  // selected rows) for each contiguous piece, in order.
  static absl::Status ForEachPiece(
      const TensorInfo& tensor, uint64_t offset_bytes, uint64_t size_bytes,
      absl::FunctionRef<absl::Status(uint64_t, uint64_t, uint64_t)> piece);

  RandomAccessFile file_;
  std::vector<TensorInfo> tensors_;
};

class SafetensorsFile final : public TensorFile {
 public:
  static absl::StatusOr<SafetensorsFile> Open(const std::string& path);

 private:
  SafetensorsFile(RandomAccessFile file, uint64_t data_start_bytes,
                  std::vector<TensorInfo> tensors)
      : TensorFile(std::move(file), std::move(tensors)),
        data_start_bytes_(data_start_bytes) {}

  absl::Status ReadWhole(const TensorInfo& tensor, uint64_t offset_bytes,
                         std::span<std::byte> out) const override;
  FileRange RangeOf(const TensorInfo& tensor, uint64_t offset_bytes,
                    uint64_t size_bytes) const override;

  uint64_t data_start_bytes_;
};

// A stored tensor, or a selection of its rows, under another name.
struct TensorView {
  std::string name;
  RowBlocks rows;
  // rows in the selection; unused if all rows are selected
  int64_t num_rows = 0;
};

// The tensors of a checkpoint, by name. In a folder they are in
// model.safetensors, or in the shards that model.safetensors.index.json lists.
// If both files exist and the index does not list model.safetensors, then
// model.safetensors is read and a warning names both.
// Threads: const methods may be called from any thread.
// Errors: NOT_FOUND if the folder has neither file. FAILED_PRECONDITION if the
// fingerprint of a shard differs from the index (docs/artifact.md).
class TensorStore {
 public:
  struct Entry {
    const TensorFile* file = nullptr;
    const TensorInfo* info = nullptr;
  };

  using Entries = std::map<std::string, Entry, std::less<>>;

  static absl::StatusOr<TensorStore> Open(const std::string& folder);
  // The tensors of these files, which all have different names.
  static TensorStore Of(std::vector<std::unique_ptr<TensorFile>> files);

  // Replaces each stored tensor by the views that `views_of` returns for it:
  // the tensor or selections of its rows, each with its own name.
  // INVALID_ARGUMENT if two views have the same name.
  absl::Status Rename(
      absl::FunctionRef<absl::StatusOr<std::vector<TensorView>>(const Entry&)>
          views_of);

  // Returns nullptr if there is none. The entry lives as long as the store.
  const Entry* Find(std::string_view name) const;
  const Entries& entries() const { return entries_; }
  // The tensors with the names and shapes that they have in the files.
  const Entries& stored() const { return stored_; }

 private:
  std::vector<std::unique_ptr<TensorFile>> files_;
  std::vector<std::unique_ptr<TensorInfo>> choices_;
  Entries entries_;
  Entries stored_;
};

}  // namespace kvasir::model
