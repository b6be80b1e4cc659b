#include "base/net/memory_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

// The headers of Linux before 6.3 lack this flag. Some newer systems warn about
// memory files without it, or refuse to create them.
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace kvasir::base {
namespace {

absl::Status Failed(const char* what) {
  return absl::UnavailableError(
      absl::StrCat("memory file: ", what, " failed: ", std::strerror(errno)));
}

// Owns a descriptor, or nothing (-1), and closes it when destroyed.
class Descriptor {
 public:
  explicit Descriptor(int file) : file_(file) {}
  Descriptor(Descriptor&& from) noexcept
      : file_(std::exchange(from.file_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor() {
    if (open()) close(file_);
  }
  bool open() const { return file_ >= 0; }
  int get() const { return file_; }

 private:
  int file_;
};

// Creates an empty file in memory. Returns its descriptor, or -1 with errno.
int NewFile() {
  constexpr char kName[] = "kvasir";
  const int file = memfd_create(kName, MFD_CLOEXEC | MFD_NOEXEC_SEAL);
  // Older systems do not know MFD_NOEXEC_SEAL.
  if (file >= 0 || errno != EINVAL) return file;
  return memfd_create(kName, MFD_CLOEXEC);
}

absl::Status Write(int file, const std::string& text, std::time_t changed) {
  size_t written = 0;
  while (written < text.size()) {
    const ssize_t bytes =
        write(file, text.data() + written, text.size() - written);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes <= 0) return Failed("write");
    written += static_cast<size_t>(bytes);
  }
  const timespec times[] = {{changed, 0}, {changed, 0}};
  if (futimens(file, times) != 0) return Failed("futimens");
  if (fchmod(file, 0600) != 0) return Failed("fchmod");
  return absl::OkStatus();
}

}  // namespace

MemoryFile::MemoryFile(int file)
    : file_(file), path_(absl::StrCat("/proc/self/fd/", file)) {}

MemoryFile::~MemoryFile() { close(file_); }

absl::StatusOr<std::unique_ptr<MemoryFile>> MemoryFile::Create(
    const std::string& text) {
  const int file = NewFile();
  if (file < 0) return Failed("memfd_create");
  auto made = std::unique_ptr<MemoryFile>(new MemoryFile(file));
  KVASIR_RETURN_IF_ERROR(made->Replace(text));
  return made;
}

absl::Status MemoryFile::Replace(const std::string& text) {
  return ReplaceAll({{this, text}});
}

absl::Status MemoryFile::ReplaceAll(const std::vector<Change>& changes) {
  struct Step {
    Descriptor next;
    Descriptor before;
    std::time_t changed;
  };
  // First do everything that may fail because memory or descriptors run out, so
  // that a failure changes nothing.
  std::vector<Step> steps;
  for (const auto& [file, text] : changes) {
    Step step{Descriptor(NewFile()),
              Descriptor(fcntl(file->file_, F_DUPFD_CLOEXEC, 0)),
              std::max(std::time(nullptr), file->changed_ + 1)};
    if (!step.next.open()) return Failed("memfd_create");
    if (!step.before.open()) return Failed("fcntl");
    KVASIR_RETURN_IF_ERROR(Write(step.next.get(), text, step.changed));
    steps.push_back(std::move(step));
  }
  for (size_t at = 0; at < steps.size(); ++at) {
    // From now on, the file's descriptor number refers to the new content.
    if (dup3(steps[at].next.get(), changes[at].file->file_, O_CLOEXEC) >= 0) {
      continue;
    }
    absl::Status status = Failed("dup3");
    while (at-- > 0) {
      dup3(steps[at].before.get(), changes[at].file->file_, O_CLOEXEC);
    }
    return status;
  }
  for (size_t at = 0; at < steps.size(); ++at) {
    changes[at].file->changed_ = steps[at].changed;
  }
  return absl::OkStatus();
}

}  // namespace kvasir::base
