// The packaged Abseil has its own string_view type, and std::string_view does
// not convert to it. AbslView converts one for StrCat, Status and others.
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
