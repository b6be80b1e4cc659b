// File access for checkpoints. Files are read by position into the caller's
// memory and never mapped. So a file that is truncated meanwhile causes an
// error instead of SIGBUS, and its pages do not count as this process's memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvasir::model {

// Owns: the open file descriptor.
// Threads: const methods may be called from any thread.
// Errors: Open may return NOT_FOUND or PERMISSION_DENIED. Read returns
// DATA_LOSS if the file ends before the last byte to be read; the error names
// the path and both sizes.
class RandomAccessFile {
 public:
  static absl::StatusOr<RandomAccessFile> Open(const std::string& path);

  RandomAccessFile(RandomAccessFile&& other) noexcept;
  RandomAccessFile& operator=(RandomAccessFile&& other) noexcept;
  RandomAccessFile(const RandomAccessFile&) = delete;
  RandomAccessFile& operator=(const RandomAccessFile&) = delete;
  // Asks the kernel to drop the file's pages from its page cache, and closes
  // the file.
  ~RandomAccessFile();

  const std::string& path() const { return path_; }
  uint64_t size_bytes() const { return size_bytes_; }

  // Fills `out` with the file's bytes from `offset_bytes` on.
  absl::Status Read(uint64_t offset_bytes, std::span<std::byte> out) const;

  // Hints for the kernel's page cache. They never fail.
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

// `text` is the beginning of a file. Returns FAILED_PRECONDITION if it is a
// Git LFS pointer instead of the file's content; the error says how to
// download the content.
absl::Status CheckNoLfsPointer(std::string_view text, const std::string& path);

// Returns the content of a small text file.
// Errors: RESOURCE_EXHAUSTED if the file is larger than `max_bytes`, and those
// of CheckNoLfsPointer.
absl::StatusOr<std::string> ReadSmallFile(const std::string& path,
                                          uint64_t max_bytes);

}  // namespace kvasir::model
