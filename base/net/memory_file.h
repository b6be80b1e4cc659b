// A text for a library that reads files by their paths, which lies in memory
// (and, like all of it, in swap where the machine has that): no folder has it,
// no other user may open it, and it is gone with the process.
#pragma once

#include <ctime>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvasir::base {

// Owns: one descriptor, which is the path. Who reads it must be done before
//   this ends: the system gives the number to another file then.
// Threads: one at a time; readers may be on others.
class MemoryFile {
 public:
  // UNAVAILABLE when the system gives no memory for it.
  static absl::StatusOr<std::unique_ptr<MemoryFile>> Create(
      const std::string& text);
  ~MemoryFile();
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  // Of this process alone.
  const std::string& path() const { return path_; }

  // Whoever opens the path from now on reads this, as a whole; whoever has
  // opened it goes on in the old text. The time of change is another, even to
  // those who look at seconds. UNAVAILABLE changes nothing.
  absl::Status Replace(const std::string& text);

  struct Change {
    MemoryFile* file;
    std::string text;
  };
  // The same of several: all of them, in their order, or none.
  static absl::Status ReplaceAll(const std::vector<Change>& changes);

 private:
  explicit MemoryFile(int file);

  const int file_;
  const std::string path_;
  std::time_t changed_ = 0;
};

}  // namespace kvasir::base
