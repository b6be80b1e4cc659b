// Reads a small file safely: another process may change or enlarge it during
// the read.
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"

namespace kvasir::base {

// Returns the whole content. The error text states only the cause, without the
// path. Returns FAILED_PRECONDITION, and reads nothing, if the file is not a
// regular file. Returns OUT_OF_RANGE if the file has more than `most_bytes`
// bytes, of which it reads at most one byte too many. Otherwise the code
// follows from the system's error, for example NOT_FOUND.
absl::StatusOr<std::string> ReadFile(const std::string& path,
                                     size_t most_bytes);

// Like ReadFile, but also reads pipes, and waits for their writer. Meant for
// commands that read a file once, at their start.
absl::StatusOr<std::string> ReadFileOrPipe(const std::string& path,
                                           size_t most_bytes);

}  // namespace kvasir::base
