// Texts for a calibration when the user gives none. They are compiled into the
// program, so no files are needed where it runs. Sources and licences:
// domains/README.md.
#pragma once

#include <string_view>
#include <vector>

namespace kvasir::compress {

struct BuiltInDomain {
  const char* name;
  std::string_view text;  // valid as long as the program runs
};

// Books, encyclopedia, code and dialogue, in English.
std::vector<BuiltInDomain> BuiltInDomains();

}  // namespace kvasir::compress
