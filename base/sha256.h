// SHA-256, for names of contents.
#pragma once

#include <string>
#include <string_view>

namespace kvasir::base {

// 64 hex digits: what sha256sum says of a file with these bytes.
std::string Sha256Hex(std::string_view bytes);

}  // namespace kvasir::base
