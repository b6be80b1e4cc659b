// Reads the characters and the classes of characters of a regular expression in
// the syntax of tokenizer files.
#pragma once

#include <unicode/uniset.h>

#include <cstddef>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "model/tokenizer/char_sets.h"

namespace kvasir::model {

// Groups and brackets may be inside one another up to this depth.
inline constexpr int kMaxRegexDepth = 250;

// The characters that an escape or a bracket stands for. If case is ignored,
// a single character and a bracket match other cases too, but \w and \p{Lu}
// do not.
struct CharItem {
  icu::UnicodeSet set;
  bool one_char = false;
  char32_t value = 0;  // if one_char
};

// Reads a pattern from its beginning to its end.
// Errors: UNIMPLEMENTED names a construct that is not supported, and
// INVALID_ARGUMENT what is wrong, both with its place.
class RegexReader {
 public:
  explicit RegexReader(std::string_view pattern) : in_(pattern) {}

  bool AtEnd() const { return at_ >= in_.size(); }
  // The byte `ahead` of this place, or 0 after the end.
  char Next(size_t ahead = 0) const {
    return at_ + ahead < in_.size() ? in_[at_ + ahead] : '\0';
  }
  bool Sees(std::string_view text) const {
    return in_.substr(at_, text.size()) == text;
  }
  // Skips `text`, if it is here.
  bool Take(std::string_view text);
  void Skip(size_t bytes) { at_ += bytes; }
  // At most `bytes` bytes from here.
  std::string_view Here(size_t bytes) const { return in_.substr(at_, bytes); }

  absl::Status Unsupported(std::string_view what) const;
  absl::Status Invalid(std::string_view what) const;

  absl::StatusOr<char32_t> OneChar();
  // Reads a backslash and what follows it, inside brackets or outside.
  absl::StatusOr<CharItem> CharEscape(WordKind words);
  // Reads [...].
  absl::StatusOr<icu::UnicodeSet> Brackets(bool ignore_case);

 private:
  std::string Text(std::string_view what) const;
  absl::StatusOr<CharItem> Property(WordKind words);
  absl::StatusOr<CharItem> HexEscape();
  absl::StatusOr<CharItem> Posix();
  absl::StatusOr<CharItem> BracketItem();
  absl::StatusOr<icu::UnicodeSet> NestedBrackets(bool outermost,
                                                 bool ignore_case);

  const std::string_view in_;
  size_t at_ = 0;
  int depth_ = 0;
};

}  // namespace kvasir::model
