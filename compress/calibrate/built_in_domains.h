// Texts to calibrate on where nobody gives any: part of the program, so that it
// has them wherever it runs. Sources and licences: domains/README.md.
#pragma once

#include <string_view>
#include <vector>

namespace kvasir::compress {

struct BuiltInDomain {
  const char* name;
  std::string_view text;  // lives as long as the program
};

// Books, encyclopedia, code and dialogue, in English.
std::vector<BuiltInDomain> BuiltInDomains();

}  // namespace kvasir::compress
