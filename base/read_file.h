// Reads a small file that others may change or make too large meanwhile.
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"

namespace kvasir::base {

// The whole content. The error text states only the cause, without the path.
// NOT_FOUND and other codes come from the system's error. OUT_OF_RANGE: the
// file has more than `most_bytes`; at most one byte beyond them is read.
absl::StatusOr<std::string> ReadFile(const std::string& path,
                                     size_t most_bytes);

}  // namespace kvasir::base
