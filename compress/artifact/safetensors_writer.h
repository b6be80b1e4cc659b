#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compress/artifact/new_file.h"
#include "model/checkpoint/safetensors.h"

namespace kvasir::compress {

struct TensorEntry {
  std::string name;
  model::TensorType dtype = model::TensorType::kBF16;
  std::vector<int64_t> shape;
};

int64_t TensorBytes(const TensorEntry& entry);

// One safetensors file, written from front to back. The entries are declared
// all at once (Create) or one at a time (CreateOpen). Their bytes are appended
// in the same order, in pieces of any size.
// Owns: a NewFile.
// Errors: all have the path in their text. The file is visible under `path`
//   only when it is complete.
class SafetensorsWriter {
 public:
  static absl::StatusOr<SafetensorsWriter> Create(
      std::filesystem::path path, const std::vector<TensorEntry>& entries);
  // Creates a file whose entries are not known yet. Reserves `header_bytes` for
  // the header, which Finish fills in and pads. `header_bytes` must be at least
  // the sum of HeaderBytes over the entries.
  static absl::StatusOr<SafetensorsWriter> CreateOpen(
      std::filesystem::path path, int64_t header_bytes);
  // An upper bound of the bytes that the entry takes in a header, wherever its
  // data is in the file.
  static int64_t HeaderBytes(const TensorEntry& entry);
  SafetensorsWriter(SafetensorsWriter&& other) noexcept = default;
  SafetensorsWriter& operator=(SafetensorsWriter&&) = delete;

  // Declares the next entry of a writer made by CreateOpen. The bytes of all
  // entries before it must have been appended.
  void Declare(TensorEntry entry);
  absl::Status Append(std::span<const std::byte> bytes);
  int64_t appended_bytes() const { return appended_bytes_; }
  // Completes the file and gives it its name. Errors: FailedPrecondition if
  // fewer bytes were appended than declared; ResourceExhausted if the entries
  // need more space than the header has.
  absl::Status Finish();

 private:
  SafetensorsWriter(std::filesystem::path path, std::unique_ptr<NewFile> file)
      : path_(std::move(path)), file_(std::move(file)) {}

  std::filesystem::path path_;
  std::unique_ptr<NewFile> file_;
  int64_t declared_bytes_ = 0;
  int64_t appended_bytes_ = 0;
  // Bytes that CreateOpen reserved for the header; 0 after Create.
  int64_t header_room_bytes_ = 0;
  std::vector<TensorEntry> entries_;
};

// Rounds `value` to the nearest bfloat16, ties to even, and returns the bits of
// the result. `value` must not be NaN.
uint16_t ToBf16Bits(float value);

}  // namespace kvasir::compress
