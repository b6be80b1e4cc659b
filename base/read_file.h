// Reads a small file, with a limit of its size that also holds if another
// process enlarges the file during the read.
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"

namespace kvasir::base {

// Returns the whole content. Errors: FAILED_PRECONDITION if it is not a regular
// file (nothing is read); OUT_OF_RANGE if it is larger than `most_bytes`;
// otherwise the system's error, for example NOT_FOUND. The error text states
// the cause, without the path.
absl::StatusOr<std::string> ReadFile(const std::string& path,
                                     size_t most_bytes);

// Like ReadFile, but also reads pipes, and waits for their writer. Meant for
// commands that read a file once, at their start.
absl::StatusOr<std::string> ReadFileOrPipe(const std::string& path,
                                           size_t most_bytes);

}  // namespace kvasir::base
