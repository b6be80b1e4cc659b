// Translates the regular expressions of tokenizer files for ICU.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace kvasir::model {

// A pattern of the syntax "Oniguruma" as an expression that means the same to
// ICU. Nothing is copied: every construct is either parsed and written anew, or
// refused. INVALID_ARGUMENT: the syntax is wrong. UNIMPLEMENTED: a construct is
// not supported; the error names it and its place.
absl::StatusOr<std::string> TranslateRegex(std::string_view pattern);

}  // namespace kvasir::model
