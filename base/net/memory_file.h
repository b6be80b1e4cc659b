// A text in memory for a library that reads files by their paths. It is in no
// folder, no other user may open it, and it ends with the process. Like all
// memory it may go to swap.
#pragma once

#include <ctime>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvasir::base {

// Owns: one descriptor, whose number is in the path. Readers must be done
//   before this object ends: the system gives the number to another file then.
// Threads: one at a time; readers may be on other threads.
class MemoryFile {
 public:
  // UNAVAILABLE if the system has no memory or descriptors for it.
  static absl::StatusOr<std::unique_ptr<MemoryFile>> Create(
      const std::string& text);
  ~MemoryFile();
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  // Valid only in this process.
  const std::string& path() const { return path_; }

  // A reader that opens the path from now on reads the new text as a whole; a
  // reader that has it open continues with the old text. The modification time
  // differs by at least a second, because some readers compare only seconds.
  // UNAVAILABLE changes nothing.
  absl::Status Replace(const std::string& text);

  struct Change {
    MemoryFile* file;
    std::string text;
  };
  // Replaces several texts in this order, or none of them.
  static absl::Status ReplaceAll(const std::vector<Change>& changes);

 private:
  explicit MemoryFile(int file);

  const int file_;
  const std::string path_;
  std::time_t changed_ = 0;
};

}  // namespace kvasir::base
