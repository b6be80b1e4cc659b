// A file in memory, for a library that can read only files. It is in no folder,
// other users cannot open it, and it disappears with the process. Like all
// memory, it may be swapped out.
#pragma once

#include <ctime>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvasir::base {

// Owns: one descriptor, whose number is part of the path. Readers must be done
// before this object is destroyed, because the system may then give the number
// to another file.
// Threads: only one thread at a time may use it, but readers of the path may be
//   on any thread.
class MemoryFile {
 public:
  // UNAVAILABLE if the system has no memory or descriptors for the file.
  static absl::StatusOr<std::unique_ptr<MemoryFile>> Create(
      const std::string& text);
  ~MemoryFile();
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  // Valid only in this process.
  const std::string& path() const { return path_; }

  // Replaces the content. A reader that opens the path from now on reads all
  // of the new text; a reader that already has it open continues with the old
  // text. Each new modification time is at least a second later, because some
  // readers compare only whole seconds. On an error (UNAVAILABLE), nothing
  // has changed.
  absl::Status Replace(const std::string& text);

  struct Change {
    MemoryFile* file;
    std::string text;
  };
  // Replaces the texts of several files, in this order. On an error, none
  // is replaced.
  static absl::Status ReplaceAll(const std::vector<Change>& changes);

 private:
  explicit MemoryFile(int file);

  const int file_;
  const std::string path_;
  std::time_t changed_ = 0;
};

}  // namespace kvasir::base
