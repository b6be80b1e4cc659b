// Plain file access for checkpoints: positioned reads into the caller's memory,
// never a mapping, so that a file truncated under us is an error and not a
// SIGBUS, and so that no page of it counts as ours.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvasir::model {

// Owns: the descriptor.
// Threads: const methods from any thread.
// Errors: NOT_FOUND / PERMISSION_DENIED from opening, DATA_LOSS for a file that
// ends before the wanted range, with path, want and have.
class RandomAccessFile {
 public:
  static absl::StatusOr<RandomAccessFile> Open(const std::string& path);

  RandomAccessFile(RandomAccessFile&& other) noexcept;
  RandomAccessFile& operator=(RandomAccessFile&& other) noexcept;
  RandomAccessFile(const RandomAccessFile&) = delete;
  RandomAccessFile& operator=(const RandomAccessFile&) = delete;
  // Releases the whole file's cached pages.
  ~RandomAccessFile();

  const std::string& path() const { return path_; }
  uint64_t size_bytes() const { return size_bytes_; }

  // Fills `out` from `offset_bytes`.
  absl::Status Read(uint64_t offset_bytes, std::span<std::byte> out) const;

  // Hints to the kernel; never fail.
  void WillNeed(uint64_t offset_bytes, uint64_t size_bytes) const;
  void Release(uint64_t offset_bytes, uint64_t size_bytes) const;

 private:
  RandomAccessFile(std::string path, int descriptor, uint64_t size_bytes)
      : path_(std::move(path)),
        descriptor_(descriptor),
        size_bytes_(size_bytes) {}

  std::string path_;
  int descriptor_ = -1;
  uint64_t size_bytes_ = 0;
};

bool FileExists(const std::string& path);

// FAILED_PRECONDITION that says what to do where a file that begins with `text`
// is only the pointer that Git LFS leaves in its place.
absl::Status CheckNoLfsPointer(std::string_view text, const std::string& path);

// The whole of a small text file; RESOURCE_EXHAUSTED above `max_bytes`,
// CheckNoLfsPointer's.
absl::StatusOr<std::string> ReadSmallFile(const std::string& path,
                                          uint64_t max_bytes);

}  // namespace kvasir::model
