#include "model/tokenizer/text_pattern.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace kvasir::model {

absl::StatusOr<TextPattern> TextPattern::FromJson(const JsonRef& ref) {
  TextPattern pattern;
  KVASIR_ASSIGN_OR_RETURN(const auto literal, ref.Find("String"));
  if (literal) {
    KVASIR_ASSIGN_OR_RETURN(pattern.literal_, literal->String());
    if (pattern.literal_.empty()) return literal->Invalid("a nonempty string");
    return pattern;
  }
  KVASIR_ASSIGN_OR_RETURN(const auto regex, ref.Find("Regex"));
  if (!regex) return ref.Invalid("an object with String or Regex");
  KVASIR_ASSIGN_OR_RETURN(const std::string source, regex->String());
  auto compiled = OfRegex(source);
  if (!compiled.ok()) {
    return absl::Status(
        compiled.status().code(),
        absl::StrCat(regex->path(), ": ", compiled.status().message()));
  }
  return compiled;
}

absl::StatusOr<TextPattern> TextPattern::OfRegex(std::string_view source) {
  TextPattern pattern;
  pattern.scanner_ = WordScanner::ForPattern(source);
  if (pattern.scanner_) return pattern;
  KVASIR_ASSIGN_OR_RETURN(pattern.regex_, Regex::Compile(std::string(source)));
  return pattern;
}

PatternFinder::PatternFinder(const TextPattern& pattern) : pattern_(&pattern) {
  if (pattern.regex_) {
    matcher_ = std::make_unique<RegexMatcher>(*pattern.regex_);
  }
}

absl::Status PatternFinder::FindAll(std::string_view text,
                                    std::vector<TextRange>* matches) {
  matches->clear();
  if (matcher_) return matcher_->FindAll(text, matches);
  if (pattern_->scanner_) {
    pattern_->scanner_->FindAll(text, matches);
    return absl::OkStatus();
  }
  const std::string& literal = pattern_->literal();
  for (size_t at = text.find(literal); at != std::string_view::npos;
       at = text.find(literal, at + literal.size())) {
    matches->push_back({at, at + literal.size()});
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReplaceAll(const TextPattern& pattern,
                                       std::string_view content,
                                       std::string_view text, size_t max_bytes,
                                       size_t* front) {
  PatternFinder finder(pattern);
  std::vector<TextRange> matches;
  KVASIR_RETURN_IF_ERROR(finder.FindAll(text, &matches));
  if (matches.size() * content.size() + text.size() > max_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "replacing each of ", matches.size(), " matches by ", content.size(),
        " bytes in a text of ", text.size(),
        " bytes may give more than the limit of ", max_bytes, " bytes"));
  }
  std::string out;
  out.reserve(text.size() + matches.size() * content.size());
  size_t done = 0;
  size_t new_front = 0;
  const auto keep = [&](size_t end) {
    out.append(text.substr(done, end - done));
    if (front && done < *front) new_front += std::min(end, *front) - done;
  };
  for (const TextRange& match : matches) {
    keep(match.begin);
    out.append(content);
    if (front && std::max<size_t>(match.end, 1) <= *front) {
      new_front += content.size();
    }
    done = match.end;
  }
  keep(text.size());
  if (front) *front = new_front;
  return out;
}

}  // namespace kvasir::model
