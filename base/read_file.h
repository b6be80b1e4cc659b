// A small file that may change, or be made too large, by whoever may write it.
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"

namespace kvasir::base {

// All of it. The text of an error is its cause alone, without the path:
// NOT_FOUND and friends as the system has it, OUT_OF_RANGE for more than
// `most_bytes`, of which no more is read than tells so.
absl::StatusOr<std::string> ReadFile(const std::string& path,
                                     size_t most_bytes);

}  // namespace kvasir::base
