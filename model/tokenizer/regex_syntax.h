// Translates the regular expressions of tokenizer files for ICU.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace kvasir::model {

// Returns an ICU expression with the same meaning as `pattern`, which has
// Oniguruma's syntax. No part of the pattern is copied unparsed: every
// construct is either translated or refused. INVALID_ARGUMENT: the syntax is
// wrong. UNIMPLEMENTED: a construct is not supported; the error names it and
// its place.
absl::StatusOr<std::string> TranslateRegex(std::string_view pattern);

}  // namespace kvasir::model
