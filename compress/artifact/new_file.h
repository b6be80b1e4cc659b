#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvasir::compress {

// A file that appears under its name only when it is complete and on the disk;
// it then replaces an old file of that name. A crash of the program or of the
// machine never leaves a partial file under the name.
// Owns: the file `path`.partial. It is locked against other processes and
//   writers, and removed unless Finish was called.
// Threads: one caller.
// Errors: Unavailable with the path and the system's reason.
class NewFile {
 public:
  static absl::StatusOr<std::unique_ptr<NewFile>> Create(
      std::filesystem::path path);
  ~NewFile();
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  absl::Status Append(std::span<const std::byte> bytes);
  // Overwrites bytes that an earlier Append wrote, from `offset_bytes` on.
  absl::Status Rewrite(int64_t offset_bytes, std::span<const std::byte> bytes);
  absl::Status Finish();

  int64_t size_bytes() const { return size_bytes_; }

 private:
  NewFile(std::filesystem::path path, std::filesystem::path partial_path,
          int descriptor)
      : path_(std::move(path)),
        partial_path_(std::move(partial_path)),
        descriptor_(descriptor) {}
  absl::Status WriteAt(int64_t offset_bytes, std::span<const std::byte> bytes);

  const std::filesystem::path path_;
  const std::filesystem::path partial_path_;
  const int descriptor_;
  int64_t size_bytes_ = 0;
  bool finished_ = false;
};

// Writes a small file through a NewFile, so that it never appears incomplete.
absl::Status WriteFileAtomically(const std::filesystem::path& path,
                                 const std::string& content);

// Returns an error if no NewFile can be created at `path`, for a check before
// long work. The check creates a file with another name, so it does not disturb
// a writer of `path`.
absl::Status CheckWritable(const std::filesystem::path& path);

// Opens the file, creates it if it does not exist, and locks it. The caller
// closes the result, which releases the lock. Unavailable if another process or
// descriptor holds the lock. On a file system without locks the file is not
// locked.
absl::StatusOr<int> OpenLocked(const std::filesystem::path& path);

// Waits until the content of a file, or the list of files of a folder, is on
// the disk.
absl::Status SyncToDisk(const std::filesystem::path& path);

}  // namespace kvasir::compress
