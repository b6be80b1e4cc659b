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

// One safetensors file, written front to back: the entries are declared first,
// all at once or one at a time, and their bytes appended in that order, in
// pieces of any size.
// Owns: a NewFile.
// Errors: Status with the path; nothing is ever visible under `path` that is
// not complete.
class SafetensorsWriter {
 public:
  static absl::StatusOr<SafetensorsWriter> Create(
      std::filesystem::path path, const std::vector<TensorEntry>& entries);
  // For entries that are not known yet: leaves room for a header of
  // `header_bytes` (HeaderBytes of what will come, or more), which Finish fills
  // in and pads.
  static absl::StatusOr<SafetensorsWriter> CreateOpen(
      std::filesystem::path path, int64_t header_bytes);
  // At most what the entry takes in a header, whatever its place.
  static int64_t HeaderBytes(const TensorEntry& entry);
  SafetensorsWriter(SafetensorsWriter&& other) noexcept = default;
  SafetensorsWriter& operator=(SafetensorsWriter&&) = delete;

  // The next entry of a writer made by CreateOpen, once the bytes of those
  // before it are there.
  void Declare(TensorEntry entry);
  absl::Status Append(std::span<const std::byte> bytes);
  int64_t appended_bytes() const { return appended_bytes_; }
  // FailedPrecondition when fewer bytes were appended than declared;
  // ResourceExhausted when the entries need more than the room left for them.
  absl::Status Finish();

 private:
  SafetensorsWriter(std::filesystem::path path, std::unique_ptr<NewFile> file)
      : path_(std::move(path)), file_(std::move(file)) {}

  std::filesystem::path path_;
  std::unique_ptr<NewFile> file_;
  int64_t declared_bytes_ = 0;
  int64_t appended_bytes_ = 0;
  // Of CreateOpen; 0 otherwise.
  int64_t header_room_bytes_ = 0;
  std::vector<TensorEntry> entries_;
};

// Nearest bfloat16, ties to even, as stored bits. Not for NaN.
uint16_t ToBf16Bits(float value);

}  // namespace kvasir::compress
