#include "model/files/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace kvasir::model {
namespace {

// The most bytes that one call of pread is asked for. Linux transfers at most 2
// GiB in one call, and any smaller limit would do.
constexpr size_t kMaxReadBytes = size_t{8} << 20;

}  // namespace

absl::StatusOr<RandomAccessFile> RandomAccessFile::Open(
    const std::string& path) {
  // O_NONBLOCK, because opening a FIFO must not wait for a writer.
  const int descriptor =
      ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) {
    return absl::ErrnoToStatus(errno, absl::StrFormat("cannot open %s", path));
  }
  RandomAccessFile file(path, descriptor, 0);
  struct stat info;
  if (::fstat(descriptor, &info) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrFormat("cannot stat %s", path));
  }
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s is not a regular file", path));
  }
  file.size_bytes_ = static_cast<uint64_t>(info.st_size);
  (void)::posix_fadvise(descriptor, 0, 0, POSIX_FADV_SEQUENTIAL);
  return file;
}

RandomAccessFile::RandomAccessFile(RandomAccessFile&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      size_bytes_(other.size_bytes_) {}

RandomAccessFile& RandomAccessFile::operator=(
    RandomAccessFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(descriptor_, other.descriptor_);
  std::swap(size_bytes_, other.size_bytes_);
  return *this;
}

RandomAccessFile::~RandomAccessFile() {
  if (descriptor_ < 0) return;
  Release(0, size_bytes_);
  ::close(descriptor_);
}

absl::Status RandomAccessFile::Read(uint64_t offset_bytes,
                                    std::span<std::byte> out) const {
  size_t done = 0;
  while (done < out.size()) {
    const size_t want = std::min(out.size() - done, kMaxReadBytes);
    const ssize_t got = ::pread(descriptor_, out.data() + done, want,
                                static_cast<off_t>(offset_bytes + done));
    if (got < 0) {
      if (errno == EINTR) continue;
      return absl::ErrnoToStatus(
          errno, absl::StrFormat("cannot read %s at byte %d", path_,
                                 offset_bytes + done));
    }
    if (got == 0) {
      return absl::DataLossError(absl::StrFormat(
          "%s is truncated: its first %d bytes are needed, but the file has "
          "only %d bytes",
          path_, offset_bytes + out.size(), offset_bytes + done));
    }
    done += static_cast<size_t>(got);
  }
  return absl::OkStatus();
}

void RandomAccessFile::WillNeed(uint64_t offset_bytes,
                                uint64_t size_bytes) const {
  (void)::posix_fadvise(descriptor_, static_cast<off_t>(offset_bytes),
                        static_cast<off_t>(size_bytes), POSIX_FADV_WILLNEED);
}

void RandomAccessFile::Release(uint64_t offset_bytes,
                               uint64_t size_bytes) const {
  (void)::posix_fadvise(descriptor_, static_cast<off_t>(offset_bytes),
                        static_cast<off_t>(size_bytes), POSIX_FADV_DONTNEED);
}

bool FileExists(const std::string& path) {
  struct stat info;
  return ::stat(path.c_str(), &info) == 0;
}

absl::Status CheckNoLfsPointer(std::string_view text, const std::string& path) {
  if (!text.starts_with("version https://git-lfs")) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrFormat("%s is only a Git LFS pointer, because the file itself "
                      "was not downloaded: run `git lfs install` and `git lfs "
                      "pull` in its folder, or download the file",
                      path));
}

absl::StatusOr<std::string> ReadSmallFile(const std::string& path,
                                          uint64_t max_bytes) {
  KVASIR_ASSIGN_OR_RETURN(const RandomAccessFile file,
                          RandomAccessFile::Open(path));
  if (file.size_bytes() > max_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("%s has %d bytes, but the limit is %d bytes", path,
                        file.size_bytes(), max_bytes));
  }
  std::string text(file.size_bytes(), '\0');
  KVASIR_RETURN_IF_ERROR(
      file.Read(0, std::as_writable_bytes(std::span<char>(text))));
  KVASIR_RETURN_IF_ERROR(CheckNoLfsPointer(text, path));
  return text;
}

}  // namespace kvasir::model
