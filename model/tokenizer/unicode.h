// Character classes, normal forms and regular expressions over UTF-8, using
// ICU. Each has the Unicode version of the reference (reference_unicode.h).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvasir::model {

bool IsWhiteSpace(char32_t c);
// SpaceEnd returns the end of the whitespace that begins at `begin`.
// SpaceBegin returns the beginning of the whitespace that ends at `end`, but
// not less than `least`.
size_t SpaceEnd(std::string_view text, size_t begin);
size_t SpaceBegin(std::string_view text, size_t end, size_t least);
// True for category P of Unicode 8.0, and for all punctuation and symbols
// of ASCII.
bool IsPunctuation(char32_t c);
bool IsNumeric(char32_t c);  // category N of Unicode 17.0
bool IsNumber(char32_t c);   // as \p{N} in patterns
bool IsLetter(char32_t c);   // as \p{L} in patterns
// True for letters, marks, decimal digits, connectors and joiners.
bool IsWordChar(char32_t c);

// Appends the lower case of `c` without regard to its neighbours: Σ always
// becomes σ.
void AppendLower(char32_t c, std::string* out);

enum class NormalForm { kNfc, kNfd, kNfkc, kNfkd };

// Converts `text` to a normal form of Unicode 9.0. `text` must be valid UTF-8.
absl::StatusOr<std::string> Normalize(NormalForm form, std::string_view text);

// Byte range [begin, end) of a text.
struct TextRange {
  size_t begin = 0;
  size_t end = 0;
};

// A compiled pattern in the dialect of tokenizer files.
// Threads: immutable and shared; a RegexMatcher belongs to one thread.
class Regex {
 public:
  // INVALID_ARGUMENT: the pattern is wrong. UNIMPLEMENTED: it has a construct
  // that is not translated (regex_syntax.h).
  static absl::StatusOr<std::unique_ptr<Regex>> Compile(
      const std::string& pattern);
  ~Regex();
  Regex(const Regex&) = delete;
  Regex& operator=(const Regex&) = delete;

  const std::string& pattern() const { return pattern_; }

 private:
  friend class RegexMatcher;
  struct Impl;
  Regex(std::string pattern, std::unique_ptr<Impl> impl);

  std::string pattern_;
  std::unique_ptr<Impl> impl_;
};

// Finds a pattern in many texts, and keeps its buffers from one text to
// the next.
class RegexMatcher {
 public:
  explicit RegexMatcher(const Regex& regex);
  ~RegexMatcher();
  RegexMatcher(const RegexMatcher&) = delete;
  RegexMatcher& operator=(const RegexMatcher&) = delete;

  // Appends the non-overlapping matches from left to right, including empty
  // ones. INVALID_ARGUMENT if the search takes more steps or stack than a
  // reasonable pattern needs. `text` must be valid UTF-8.
  absl::Status FindAll(std::string_view text, std::vector<TextRange>* matches);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvasir::model
