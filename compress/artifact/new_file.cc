#include "compress/artifact/new_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace kvasir::compress {
namespace {

namespace fs = std::filesystem;

absl::Status SystemError(const std::string& what, int reason) {
  return absl::UnavailableError(
      absl::StrCat("cannot ", what, ": ", std::strerror(reason)));
}

absl::Status Busy(const fs::path& path) {
  return absl::UnavailableError(
      absl::StrCat(path.string(), " is being written by another run"));
}

// Waits until the content is on the disk. Pipes and some file systems do not
// support this, which is not an error.
absl::Status Sync(int descriptor, const fs::path& path) {
  if (::fsync(descriptor) == 0 || errno == EINVAL || errno == EROFS ||
      errno == ENOTSUP) {
    return absl::OkStatus();
  }
  return SystemError("write " + path.string() + " to the disk", errno);
}

// Returns whether the open file is still the one at `path`.
bool HasName(int descriptor, const fs::path& path) {
  struct stat open_file;
  struct stat named;
  return ::fstat(descriptor, &open_file) == 0 &&
         ::stat(path.c_str(), &named) == 0 &&
         open_file.st_dev == named.st_dev && open_file.st_ino == named.st_ino;
}

}  // namespace

absl::StatusOr<int> OpenLocked(const fs::path& path) {
  const int descriptor =
      ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666);
  if (descriptor < 0) return SystemError("write " + path.string(), errno);
  absl::Status status;
  if (::flock(descriptor, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) {
      status = Busy(path);
    } else if (errno != ENOLCK && errno != ENOTSUP && errno != EINVAL) {
      status = SystemError("lock " + path.string(), errno);
    }
  } else if (!HasName(descriptor, path)) {
    // Another writer held the lock and has just renamed or removed the file, so
    // `path` no longer names the locked file.
    status = Busy(path);
  }
  if (status.ok()) return descriptor;
  ::close(descriptor);
  return status;
}

absl::Status SyncToDisk(const fs::path& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return SystemError("open " + path.string(), errno);
  const absl::Status status = Sync(descriptor, path);
  ::close(descriptor);
  return status;
}

absl::StatusOr<std::unique_ptr<NewFile>> NewFile::Create(fs::path path) {
  fs::path partial = path.string() + ".partial";
  KVASIR_ASSIGN_OR_RETURN(const int descriptor, OpenLocked(partial));
  std::unique_ptr<NewFile> file(
      new NewFile(std::move(path), std::move(partial), descriptor));
  // Removes what a killed run may have left in the file.
  if (::ftruncate(descriptor, 0) != 0) {
    return SystemError("write " + file->partial_path_.string(), errno);
  }
  return file;
}

NewFile::~NewFile() {
  // Unlink while the lock is held: once it is released, another run may use the
  // name.
  if (!finished_) ::unlink(partial_path_.c_str());
  ::close(descriptor_);
}

absl::Status NewFile::WriteAt(int64_t offset_bytes,
                              std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written =
        ::pwrite(descriptor_, bytes.data(), bytes.size(), offset_bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      return SystemError(absl::StrCat("write ", partial_path_.string(),
                                      " at byte ", offset_bytes),
                         errno);
    }
    offset_bytes += written;
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

absl::Status NewFile::Append(std::span<const std::byte> bytes) {
  KVASIR_RETURN_IF_ERROR(WriteAt(size_bytes_, bytes));
  size_bytes_ += static_cast<int64_t>(bytes.size());
  return absl::OkStatus();
}

absl::Status NewFile::Rewrite(int64_t offset_bytes,
                              std::span<const std::byte> bytes) {
  return WriteAt(offset_bytes, bytes);
}

absl::Status NewFile::Finish() {
  KVASIR_RETURN_IF_ERROR(Sync(descriptor_, partial_path_));
  if (::rename(partial_path_.c_str(), path_.c_str()) != 0) {
    return SystemError(
        absl::StrCat("rename ", partial_path_.string(), " to ", path_.string()),
        errno);
  }
  finished_ = true;
  const fs::path folder = path_.parent_path();
  return SyncToDisk(folder.empty() ? fs::path(".") : folder);
}

absl::Status CheckWritable(const fs::path& path) {
  std::error_code error;
  if (fs::is_directory(path, error)) {
    return SystemError("write " + path.string(), EISDIR);
  }
  std::string trial = path.string() + ".XXXXXX";
  const int descriptor = ::mkostemp(trial.data(), O_CLOEXEC);
  if (descriptor < 0) return SystemError("write " + path.string(), errno);
  ::unlink(trial.c_str());
  ::close(descriptor);
  return absl::OkStatus();
}

absl::Status WriteFileAtomically(const fs::path& path,
                                 const std::string& content) {
  KVASIR_ASSIGN_OR_RETURN(const std::unique_ptr<NewFile> file,
                          NewFile::Create(path));
  KVASIR_RETURN_IF_ERROR(
      file->Append(std::as_bytes(std::span(content.data(), content.size()))));
  return file->Finish();
}

}  // namespace kvasir::compress
