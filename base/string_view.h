// Conversions between std::string_view and absl::string_view. In
// Debian's Abseil they are different types, and its functions take
// only absl::string_view.
#pragma once

#include <string_view>

#include "absl/strings/string_view.h"

namespace kvasir::base {

inline absl::string_view AbslView(std::string_view text) {
  return absl::string_view(text.data(), text.size());
}
inline std::string_view StdView(absl::string_view text) {
  return std::string_view(text.data(), text.size());
}

}  // namespace kvasir::base
