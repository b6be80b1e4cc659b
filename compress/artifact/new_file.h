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

// A file that appears under its name when it is complete and on the disk, in
// place of what has the name, and not before: neither a crash of the program
// nor one of the machine leaves a part of it there.
// Owns: `path`.partial, locked against other processes and writers; one that is
//   not finished is removed.
// Threads: one.
// Errors: Unavailable with the path and the system's reason.
class NewFile {
 public:
  static absl::StatusOr<std::unique_ptr<NewFile>> Create(
      std::filesystem::path path);
  ~NewFile();
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  absl::Status Append(std::span<const std::byte> bytes);
  // Writes over what was appended.
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

// Writes a small file in this way.
absl::Status WriteFileAtomically(const std::filesystem::path& path,
                                 const std::string& content);

// Whether such a file can be made there, for before long work. What is tried
// has a name of its own: a writer of the same file is not disturbed.
absl::Status CheckWritable(const std::filesystem::path& path);

// Opens the file, which is made where there is none, and takes its lock; the
// result is to be closed, which gives the lock up. Unavailable where another
// process or descriptor has the lock. A file system without locks gives none.
absl::StatusOr<int> OpenLocked(const std::filesystem::path& path);

// Waits until a file's content, or the names in a folder, are on the disk.
absl::Status SyncToDisk(const std::filesystem::path& path);

}  // namespace kvasir::compress
