#include "base/net/memory_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

// Of Linux 6.3; without it some systems warn, or refuse.
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace kvasir::base {
namespace {

absl::Status Failed(const char* what) {
  return absl::UnavailableError(
      absl::StrCat("no memory file: ", what, ": ", std::strerror(errno)));
}

// A descriptor, or -1 and errno.
int NewFile() {
  constexpr char kName[] = "kvasir";
  const int file = memfd_create(kName, MFD_CLOEXEC | MFD_NOEXEC_SEAL);
  // An older system knows no such flag.
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
  const int file = NewFile();
  if (file < 0) return Failed("memfd_create");
  const std::time_t changed = std::max(std::time(nullptr), changed_ + 1);
  absl::Status status = Write(file, text, changed);
  // At one moment the number stands for the new file.
  if (status.ok() && dup3(file, file_, O_CLOEXEC) < 0) status = Failed("dup3");
  close(file);
  if (status.ok()) changed_ = changed;
  return status;
}

}  // namespace kvasir::base
