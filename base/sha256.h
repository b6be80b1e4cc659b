// SHA-256 hashes, to identify contents and secrets.
#pragma once

#include <string>
#include <string_view>

namespace kvasir::base {

// Returns 64 hex digits, as sha256sum prints them for a file with these bytes.
std::string Sha256Hex(std::string_view bytes);

// Compares two texts. For texts of equal length, the time does not depend on
// their bytes, so timing reveals nothing about a secret. For texts of different
// lengths, returns false at once.
bool EqualInConstantTime(std::string_view a, std::string_view b);

}  // namespace kvasir::base
