// Texts on which a model is calibrated if the user gives none. They are
// compiled into the program, so it needs no text files when it runs. Sources
// and licences: domains/README.md.
#pragma once

#include <string_view>
#include <vector>

namespace kvasir::compress {

struct BuiltInDomain {
  const char* name;
  std::string_view text;  // valid as long as the program runs
};

// Returns the four English domains: books, encyclopedia, code and dialogue.
std::vector<BuiltInDomain> BuiltInDomains();

}  // namespace kvasir::compress
