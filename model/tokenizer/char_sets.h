// The character sets of the regular expressions of tokenizer files, as the
// reference's engine (Oniguruma) defines them. ICU's sets of the same names
// partly differ.
#pragma once

#include <unicode/uniset.h>

#include <string_view>

#include "absl/status/statusor.h"

namespace kvasir::model {

// Outside brackets, \w, \W, \b and \p{word} count six more characters as word
// characters than [\w] and [[:word:]] do: the superscript digits and fractions
// of Latin-1.
enum class WordKind { kInBrackets, kAlone };
const icu::UnicodeSet& WordChars(WordKind kind);

// Returns the set of \p{name}. Case, spaces, - and _ in a name do not count.
// UNIMPLEMENTED if the name is unknown.
absl::StatusOr<icu::UnicodeSet> PropertySet(std::string_view name,
                                            WordKind words);

// Returns the set of [[:name:]]. UNIMPLEMENTED if the name is unknown.
absl::StatusOr<icu::UnicodeSet> PosixSet(std::string_view name);

// Adds all characters that differ only in case from a character of `set`.
// Returns false if a character of `set` also equals several characters, as ß
// equals ss.
bool AddOtherCases(icu::UnicodeSet* set);

// True if `text` ends in two or three characters that together equal one
// character without regard to case, as ss equals ß.
bool EndsInFoldOfOneChar(const icu::UnicodeString& text);

}  // namespace kvasir::model
