// A pattern that a tokenizer file searches in texts: a literal or a
// regular expression.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "model/tokenizer/tokenizer_json.h"
#include "model/tokenizer/unicode.h"
#include "model/tokenizer/word_scanner.h"

namespace kvasir::model {

// A pattern, in JSON {"String": ...} or {"Regex": ...}.
// Threads: immutable, so any thread may use it.
class TextPattern {
 public:
  static absl::StatusOr<TextPattern> FromJson(const JsonRef& ref);
  static absl::StatusOr<TextPattern> OfRegex(std::string_view source);

  bool is_literal() const { return !literal_.empty(); }
  const std::string& literal() const { return literal_; }

 private:
  friend class PatternFinder;

  // Exactly one of these three members is used.
  std::string literal_;
  std::optional<WordScanner> scanner_;
  std::unique_ptr<Regex> regex_;
};

// Searches many texts for one pattern.
// Threads: used by one thread at a time.
class PatternFinder {
 public:
  explicit PatternFinder(const TextPattern& pattern);

  // Writes the non-overlapping matches to `matches`, from left to right. The
  // old content of `matches` is removed.
  absl::Status FindAll(std::string_view text, std::vector<TextRange>* matches);

 private:
  const TextPattern* pattern_;
  std::unique_ptr<RegexMatcher> matcher_;
};

// Returns `text` with every match replaced by `content`. INVALID_ARGUMENT if
// the result would be longer than `max_bytes`. If `front` is not null, it is
// the length of a prefix of `text`, and becomes the length of the part of the
// result that replaces this prefix. A replacement belongs to that part if the
// last replaced byte is in the prefix. An empty match at the start of `text`
// belongs to it if the prefix is not empty.
absl::StatusOr<std::string> ReplaceAll(const TextPattern& pattern,
                                       std::string_view content,
                                       std::string_view text, size_t max_bytes,
                                       size_t* front = nullptr);

}  // namespace kvasir::model
