#include "base/read_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace kvasir::base {
namespace {

constexpr size_t kChunkBytes = 16 << 10;

struct Close {
  void operator()(std::FILE* file) const { std::fclose(file); }
};

absl::Status SystemsError() {
  const int error = errno;
  return absl::Status(absl::ErrnoToStatusCode(error), std::strerror(error));
}

// Reads until the end, or until one byte beyond `most_bytes`. Closes the
// descriptor. If the descriptor is negative, returns the error of the
// failed open().
absl::StatusOr<std::string> ReadAll(int descriptor, size_t most_bytes,
                                    bool only_regular) {
  if (descriptor < 0) return SystemsError();
  const std::unique_ptr<std::FILE, Close> file(::fdopen(descriptor, "r"));
  if (file == nullptr) {
    const absl::Status error = SystemsError();
    ::close(descriptor);
    return error;
  }
  struct stat found = {};
  if (::fstat(descriptor, &found) != 0) return SystemsError();
  if (only_regular && !S_ISREG(found.st_mode)) {
    return absl::FailedPreconditionError("this is not a regular file");
  }
  std::string text;
  for (;;) {
    const size_t before = text.size();
    const size_t wanted = std::min(kChunkBytes, most_bytes + 1 - before);
    text.resize(before + wanted);
    const size_t read = std::fread(text.data() + before, 1, wanted, file.get());
    text.resize(before + read);
    if (std::ferror(file.get()) != 0) return SystemsError();
    if (read == 0) return text;
    if (text.size() > most_bytes) {
      return absl::OutOfRangeError(absl::StrCat(
          "the file has more than ", most_bytes, " bytes, the limit"));
    }
  }
}

}  // namespace

absl::StatusOr<std::string> ReadFile(const std::string& path,
                                     size_t most_bytes) {
  // Without O_NONBLOCK, opening a FIFO would wait for a writer.
  return ReadAll(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK),
                 most_bytes, /*only_regular=*/true);
}

absl::StatusOr<std::string> ReadFileOrPipe(const std::string& path,
                                           size_t most_bytes) {
  return ReadAll(::open(path.c_str(), O_RDONLY | O_CLOEXEC), most_bytes,
                 /*only_regular=*/false);
}

}  // namespace kvasir::base
