// Reads a small file safely: another process may change or enlarge it during
// the read.
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"

namespace kvasir::base {

// Returns the whole content. The error text states only the cause, without the
// path. NOT_FOUND and other codes come from the system's error.
// FAILED_PRECONDITION: it is not a regular file; it is not read then.
// OUT_OF_RANGE: the file has more than `most_bytes`; at most one byte beyond
// them is read.
absl::StatusOr<std::string> ReadFile(const std::string& path,
                                     size_t most_bytes);

// Like ReadFile, but also reads pipes, and waits for their writer. For commands
// that read a file once, at their start.
absl::StatusOr<std::string> ReadFileOrPipe(const std::string& path,
                                           size_t most_bytes);

}  // namespace kvasir::base
