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

// The greatest depth to which groups and brackets may be nested.
inline constexpr int kMaxRegexDepth = 250;

// The characters that an escape such as \w or a bracket matches. If a pattern
// ignores case, single characters and brackets also match their other cases,
// but \w and \p{Lu} do not.
struct CharItem {
  icu::UnicodeSet set;
  bool one_char = false;
  char32_t value = 0;  // if one_char
};

// Reads a pattern from its beginning to its end.
// Errors: UNIMPLEMENTED for a construct that is not supported, INVALID_ARGUMENT
// for wrong syntax. Both state the place in the pattern.
class RegexReader {
 public:
  explicit RegexReader(std::string_view pattern) : in_(pattern) {}

  bool AtEnd() const { return at_ >= in_.size(); }
  // Returns the byte `ahead` bytes after the current place, or 0
  // beyond the end.
  char Next(size_t ahead = 0) const {
    return at_ + ahead < in_.size() ? in_[at_ + ahead] : '\0';
  }
  bool Sees(std::string_view text) const {
    return in_.substr(at_, text.size()) == text;
  }
  // If the unread pattern begins with `text`, skips it and returns true.
  bool Take(std::string_view text);
  void Skip(size_t bytes) { at_ += bytes; }
  // Returns the next bytes of the pattern, at most `bytes` of them.
  std::string_view Here(size_t bytes) const { return in_.substr(at_, bytes); }

  absl::Status Unsupported(std::string_view what) const;
  absl::Status Invalid(std::string_view what) const;

  absl::StatusOr<char32_t> OneChar();
  // Reads an escape: a backslash and the characters that belong to it.
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
