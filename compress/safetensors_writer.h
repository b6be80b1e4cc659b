#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvasir::compress {

enum class StoredDtype { kF32, kBf16 };

int64_t ElementBytes(StoredDtype dtype);

struct TensorEntry {
  std::string name;
  StoredDtype dtype = StoredDtype::kBf16;
  std::vector<int64_t> shape;
};

int64_t TensorBytes(const TensorEntry& entry);

// One safetensors file, written front to back: the entries are declared first,
// then their bytes appended in that order, in pieces of any size.
// Owns: `path`.partial until Finish renames it; an unfinished one is removed.
// Errors: Status with the path; nothing is ever visible under `path` that is
// not complete.
class SafetensorsWriter {
 public:
  static absl::StatusOr<SafetensorsWriter> Create(
      std::filesystem::path path, const std::vector<TensorEntry>& entries);
  SafetensorsWriter(SafetensorsWriter&& other) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&&) = delete;
  ~SafetensorsWriter();

  absl::Status Append(std::span<const std::byte> bytes);
  // FailedPrecondition when fewer bytes were appended than declared.
  absl::Status Finish();

 private:
  SafetensorsWriter(std::filesystem::path path, int64_t declared_bytes);

  std::filesystem::path path_;
  std::filesystem::path partial_path_;  // empty: finished or moved from
  std::ofstream out_;
  int64_t declared_bytes_;
  int64_t appended_bytes_ = 0;
};

// Writes a small file by renaming a complete one into place.
absl::Status WriteFileAtomically(const std::filesystem::path& path,
                                 const std::string& content);

// Nearest bfloat16, ties to even, as stored bits. Not for NaN.
uint16_t ToBf16Bits(float value);

}  // namespace kvasir::compress
