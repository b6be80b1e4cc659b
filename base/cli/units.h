// Parses and prints sizes in the form that people use.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace kvasir::cli {

// Parses bytes with an optional binary unit: 1048576, 512MiB, 2G.
// INVALID_ARGUMENT for other text, and for sizes that do not fit into
// an int64_t.
absl::Status ParseBytes(const std::string& text, int64_t* bytes);

// Returns a text such as "1.50 GiB".
std::string HumanBytes(double bytes);

}  // namespace kvasir::cli
