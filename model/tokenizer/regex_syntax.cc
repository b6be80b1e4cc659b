#include "model/tokenizer/regex_syntax.h"

#include <unicode/uniset.h>
#include <unicode/unistr.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "base/string_view.h"
#include "model/tokenizer/char_sets.h"
#include "model/tokenizer/regex_reader.h"

namespace kvasir::model {
namespace {

using base::AbslView;
using icu::UnicodeSet;

constexpr int kMaxRepeat = 100000;
// The most bytes of a translated pattern. A class of characters becomes a list
// of its ranges, which takes up to 14,000 bytes.
constexpr size_t kMaxTranslatedBytes = 1 << 20;

// Describes which texts a part of a pattern matches.
struct Extent {
  bool asserts = false;  // it has a branch of only assertions, like \b
  bool empty = false;    // it may match an empty text
};

struct Options {
  bool ignore_case = false;
  bool dot_matches_newline = false;
};

// Writes the translation while it parses.
class RegexTranslator : private RegexReader {
 public:
  explicit RegexTranslator(std::string_view pattern) : RegexReader(pattern) {}

  absl::StatusOr<std::string> Run() {
    KVASIR_RETURN_IF_ERROR(Alternatives({}).status());
    if (!AtEnd()) return Invalid(") without (");
    return std::move(out_);
  }

 private:
  // Parses up to the end or an unmatched ")".
  absl::StatusOr<Extent> Alternatives(const Options& options);
  absl::StatusOr<Extent> Branch(const Options& options);
  // Each of these writes one item, which a quantifier may then repeat.
  absl::Status Item(const Options& options, Extent* extent);
  absl::Status Escape(const Options& options, Extent* extent);
  absl::Status Group(Options options, Extent* extent);
  absl::Status OptionGroup(Options options, Extent* extent);
  absl::Status NamedGroup(char end, const Options& options, Extent* extent);
  absl::Status Inside(const char* begin, const Options& options,
                      Extent* extent);
  absl::Status SkipComments();
  absl::Status BackReference(const Options& options);
  // Reads all quantifiers after the item that begins at `begin` in the output.
  absl::Status Quantifiers(size_t begin, Extent* extent);
  // Reads {n}, {n,}, {,m} or {n,m}. Otherwise { is an ordinary character.
  absl::StatusOr<bool> Interval(std::string* quantifier);

  absl::Status WriteChar(char32_t c, const Options& options);
  absl::Status WriteSet(const UnicodeSet& set);
  absl::Status Write(std::string_view text);

  std::string out_;
  int depth_ = 0;
  int assertions_ = 0;    // how many (?=, (?!, (?<= and (?<! are open
  int look_behinds_ = 0;  // how many (?<= and (?<! are open
  // True for each capturing group to which a back reference such as \1
  // may refer.
  std::vector<bool> groups_;
  bool named_groups_ = false;
  bool back_references_ = false;
  // The literal characters directly before the current place that are matched
  // without regard to case.
  icu::UnicodeString run_;
};

absl::Status RegexTranslator::Write(std::string_view text) {
  if (out_.size() + text.size() > kMaxTranslatedBytes) {
    return Invalid(absl::StrCat(
        "so many classes of characters that their ranges take more than the "
        "limit of ",
        kMaxTranslatedBytes, " bytes"));
  }
  out_.append(text);
  return absl::OkStatus();
}

absl::Status RegexTranslator::WriteSet(const UnicodeSet& set) {
  std::string text = "[";
  if (set.isEmpty()) text = "[^\\x{0}-\\x{10FFFF}";
  for (int32_t i = 0; i < set.getRangeCount(); ++i) {
    const auto begin = static_cast<uint32_t>(set.getRangeStart(i));
    const auto end = static_cast<uint32_t>(set.getRangeEnd(i));
    absl::StrAppendFormat(&text, "\\x{%X}", begin);
    if (begin != end) absl::StrAppendFormat(&text, "-\\x{%X}", end);
  }
  return Write(text + "]");
}

absl::Status RegexTranslator::WriteChar(char32_t c, const Options& options) {
  const auto code = static_cast<UChar32>(c);
  if (!options.ignore_case) {
    run_.remove();
    return Write(absl::StrFormat("\\x{%X}", static_cast<uint32_t>(c)));
  }
  UnicodeSet set(code, code);
  run_.append(code);
  if (!AddOtherCases(&set) || EndsInFoldOfOneChar(run_)) {
    return Unsupported(
        "a character that equals several others if case is ignored, like "
        "\xC3\x9F and ss,");
  }
  return WriteSet(set);
}

absl::StatusOr<Extent> RegexTranslator::Alternatives(const Options& options) {
  if (++depth_ > kMaxRegexDepth) {
    return Invalid(absl::StrCat("groups inside more than ", kMaxRegexDepth,
                                " others, the limit,"));
  }
  Extent any;
  while (true) {
    KVASIR_ASSIGN_OR_RETURN(const Extent branch, Branch(options));
    any.asserts |= branch.asserts;
    any.empty |= branch.empty;
    if (!Take("|")) break;
    run_.remove();
    KVASIR_RETURN_IF_ERROR(Write("|"));
  }
  --depth_;
  return any;
}

absl::StatusOr<Extent> RegexTranslator::Branch(const Options& options) {
  bool any_asserts = false;
  Extent all = {.asserts = true, .empty = true};
  KVASIR_RETURN_IF_ERROR(SkipComments());
  while (!AtEnd() && Next() != '|' && Next() != ')') {
    const size_t begin = out_.size();
    Extent item;
    KVASIR_RETURN_IF_ERROR(Item(options, &item));
    KVASIR_RETURN_IF_ERROR(Quantifiers(begin, &item));
    any_asserts |= item.asserts;
    all.asserts &= item.asserts;
    all.empty &= item.empty || item.asserts;
  }
  all.asserts &= any_asserts;
  return all;
}

absl::Status RegexTranslator::SkipComments() {
  while (Sees("(?#")) {
    while (!AtEnd() && Next() != ')') Skip(Next() == '\\' ? 2 : 1);
    if (!Take(")")) return Invalid("a comment without an end");
  }
  return absl::OkStatus();
}

absl::Status RegexTranslator::Item(const Options& options, Extent* extent) {
  switch (Next()) {
    case '\\':
      return Escape(options, extent);
    case '(':
      return Group(options, extent);
    case '[': {
      KVASIR_ASSIGN_OR_RETURN(const UnicodeSet set,
                              Brackets(options.ignore_case));
      if (set.size() == 1) {
        return WriteChar(static_cast<char32_t>(set.charAt(0)), options);
      }
      run_.remove();
      return WriteSet(set);
    }
    case '.':
      Skip(1);
      run_.remove();
      return Write(options.dot_matches_newline ? "[\\x{0}-\\x{10FFFF}]"
                                               : "[^\\x{A}]");
    case '^':
      // Matches at the start, and after a line feed unless the text ends there.
      Skip(1);
      extent->asserts = true;
      return Write("(?:\\A|(?<=\\x{A})(?!\\z))");
    case '$':
      Skip(1);
      extent->asserts = true;
      return Write("(?=\\x{A}|\\z)");
    case '*':
    case '+':
    case '?':
      return Invalid("a quantifier without anything to repeat");
    case '{': {
      std::string quantifier;
      KVASIR_ASSIGN_OR_RETURN(const bool interval, Interval(&quantifier));
      if (interval) return Invalid("a quantifier without anything to repeat");
      break;
    }
    default:
      break;
  }
  KVASIR_ASSIGN_OR_RETURN(const char32_t c, OneChar());
  return WriteChar(c, options);
}

absl::Status RegexTranslator::Escape(const Options& options, Extent* extent) {
  const char c = Next(1);
  std::string_view assertion;
  switch (c) {
    case 'A':
      assertion = "\\A";
      break;
    case 'z':
      assertion = "\\z";
      break;
    case 'Z':
      assertion = "(?=\\x{A}?\\z)";
      break;
    case 'R':
      if (look_behinds_ > 0) return Unsupported("\\R in a look-behind");
      Skip(2);
      run_.remove();
      return Write("(?>\\x{D}\\x{A}|[\\x{A}-\\x{D}\\x{85}\\x{2028}\\x{2029}])");
    case 'N':
      Skip(2);
      run_.remove();
      return Write("[^\\x{A}]");
    case 'O':
      Skip(2);
      run_.remove();
      return Write("[\\x{0}-\\x{10FFFF}]");
    case 'b':
    case 'B': {
      Skip(2);
      extent->asserts = true;
      const UnicodeSet& words = WordChars(WordKind::kAlone);
      const bool boundary = c == 'b';
      KVASIR_RETURN_IF_ERROR(Write("(?:(?<="));
      KVASIR_RETURN_IF_ERROR(WriteSet(words));
      KVASIR_RETURN_IF_ERROR(Write(boundary ? ")(?!" : ")(?="));
      KVASIR_RETURN_IF_ERROR(WriteSet(words));
      KVASIR_RETURN_IF_ERROR(Write(")|(?<!"));
      KVASIR_RETURN_IF_ERROR(WriteSet(words));
      KVASIR_RETURN_IF_ERROR(Write(boundary ? ")(?=" : ")(?!"));
      KVASIR_RETURN_IF_ERROR(WriteSet(words));
      return Write("))");
    }
    default:
      break;
  }
  if (!assertion.empty()) {
    Skip(2);
    extent->asserts = true;
    return Write(assertion);
  }
  if (c >= '1' && c <= '9') return BackReference(options);
  KVASIR_ASSIGN_OR_RETURN(const CharItem item, CharEscape(WordKind::kAlone));
  if (item.one_char) return WriteChar(item.value, options);
  run_.remove();
  return WriteSet(item.set);
}

absl::Status RegexTranslator::BackReference(const Options& options) {
  size_t size = 1;
  while (absl::ascii_isdigit(static_cast<unsigned char>(Next(size)))) ++size;
  const std::string_view digits = Here(size).substr(1);
  size_t number = 0;
  for (const char c : digits.substr(0, 5)) {
    number = number * 10 + static_cast<size_t>(c - '0');
  }
  const std::string name = absl::StrCat("\\", AbslView(digits.substr(0, 5)));
  if (digits.size() > 4 || number > groups_.size() || !groups_[number - 1]) {
    return Unsupported(absl::StrCat(
        name, ", but no group of this number ends before it outside of ",
        "(?=), (?!), (?<=) and (?<!),"));
  }
  if (options.ignore_case) {
    return Unsupported(absl::StrCat(name, " without regard to case"));
  }
  back_references_ = true;
  if (named_groups_) {
    return Unsupported(absl::StrCat(name, " in a pattern with named groups"));
  }
  run_.remove();
  Skip(size);
  return Write(absl::StrCat("(?:", name, ")"));
}

absl::Status RegexTranslator::Group(Options options, Extent* extent) {
  struct Kind {
    std::string_view begin;
    bool asserts;
  };
  for (const Kind& kind :
       {Kind{"(?:", false}, Kind{"(?>", false}, Kind{"(?=", true},
        Kind{"(?!", true}, Kind{"(?<=", true}, Kind{"(?<!", true}}) {
    if (!Take(kind.begin)) continue;
    assertions_ += kind.asserts;
    look_behinds_ += kind.begin.size() == 4;
    KVASIR_RETURN_IF_ERROR(
        Inside(std::string(kind.begin).c_str(), options, extent));
    assertions_ -= kind.asserts;
    look_behinds_ -= kind.begin.size() == 4;
    extent->asserts |= kind.asserts;
    return absl::OkStatus();
  }
  if (Take("(?<")) return NamedGroup('>', options, extent);
  if (Take("(?'")) return NamedGroup('\'', options, extent);
  if (Sees("(?")) return OptionGroup(options, extent);
  if (Sees("(*")) return Unsupported("(*");
  Skip(1);
  const size_t number = groups_.size();
  groups_.push_back(false);
  KVASIR_RETURN_IF_ERROR(Inside("(", options, extent));
  groups_[number] = assertions_ == 0;
  return absl::OkStatus();
}

absl::Status RegexTranslator::Inside(const char* begin, const Options& options,
                                     Extent* extent) {
  KVASIR_RETURN_IF_ERROR(Write(begin));
  KVASIR_ASSIGN_OR_RETURN(*extent, Alternatives(options));
  if (!Take(")")) return Invalid("a group without )");
  return Write(")");
}

absl::Status RegexTranslator::NamedGroup(char end, const Options& options,
                                         Extent* extent) {
  // Nothing can refer to this group, because \k and \g are refused.
  while (!AtEnd() && Next() != end && Next() != ')') Skip(1);
  if (!Take(std::string_view(&end, 1))) {
    return Invalid("a group without the end of its name");
  }
  named_groups_ = true;
  if (back_references_) {
    return Unsupported(
        "a named group in a pattern with a back reference like \\1");
  }
  return Inside("(?:", options, extent);
}

absl::Status RegexTranslator::OptionGroup(Options options, Extent* extent) {
  size_t size = 2;
  bool on = true;
  for (; Next(size) != ':' && Next(size) != ')'; ++size) {
    const char c = Next(size);
    if (size == Here(size + 1).size()) return Invalid("a group without )");
    if (c == '-' && on) {
      on = false;
    } else if (c == 'i') {
      options.ignore_case = on;
    } else if (c == 'm') {
      options.dot_matches_newline = on;
    } else if (c != 'x' || on) {
      return Unsupported(Here(size + 1));
    }
  }
  const bool alone = Next(size) == ')';
  Skip(size + 1);
  if (!alone) return Inside("(?:", options, extent);
  // Options without a group of their own, like (?i), hold up to the end of the
  // enclosing group, with all its remaining branches.
  KVASIR_RETURN_IF_ERROR(Write("(?:"));
  KVASIR_ASSIGN_OR_RETURN(*extent, Alternatives(options));
  return Write(")");
}

absl::StatusOr<bool> RegexTranslator::Interval(std::string* quantifier) {
  size_t size = 1;
  const auto number = [&](std::optional<int>* value) {
    for (; Next(size) >= '0' && Next(size) <= '9'; ++size) {
      *value = std::min(value->value_or(0) * 10 + (Next(size) - '0'),
                        kMaxRepeat + 1);
    }
  };
  std::optional<int> least;
  std::optional<int> most;
  number(&least);
  const bool comma = Next(size) == ',';
  if (comma) {
    ++size;
    number(&most);
  }
  if ((!least && !most) || Next(size) != '}') return false;
  if (std::max(least.value_or(0), most.value_or(0)) > kMaxRepeat) {
    return Invalid(absl::StrCat("more than ", kMaxRepeat, " repetitions"));
  }
  if (most && least.value_or(0) > *most) {
    return Unsupported("a quantifier whose minimum is above its maximum");
  }
  Skip(size + 1);
  *quantifier = absl::StrCat("{", least.value_or(0), comma ? "," : "");
  if (most) absl::StrAppend(quantifier, *most);
  quantifier->push_back('}');
  // After {n}, the signs ? and + are quantifiers of the repetition. After
  // {n,m}, so is +, but ? makes the repetition match as little as possible.
  if (comma && Take("?")) quantifier->push_back('?');
  return true;
}

absl::Status RegexTranslator::Quantifiers(size_t begin, Extent* extent) {
  std::string groups;
  std::string text;
  bool grouped = true;  // the item, or its last quantifier, is in a group
  for (;;) {
    KVASIR_RETURN_IF_ERROR(SkipComments());
    std::string quantifier;
    bool possessive = false;
    if (Next() == '{') {
      KVASIR_ASSIGN_OR_RETURN(const bool interval, Interval(&quantifier));
      if (!interval) break;
    } else if (Next() == '*' || Next() == '+' || Next() == '?') {
      quantifier = Here(1);
      Skip(1);
      possessive = Take("+");
      if (!possessive && Take("?")) quantifier.push_back('?');
    } else {
      break;
    }
    if (extent->asserts) {
      return Invalid(
          "a quantifier after an assertion, or after a group of only "
          "assertions");
    }
    // ICU would search forever if a lazy quantifier repeated an empty match.
    if (extent->empty && quantifier.back() == '?' && quantifier.size() > 1) {
      return Unsupported(absl::StrCat("the quantifier ", quantifier,
                                      " after something that may be empty"));
    }
    extent->empty |= quantifier[0] == '*' || quantifier[0] == '?' ||
                     quantifier.substr(0, 2) == "{0";
    if (!grouped) {
      groups.insert(0, "(?:");
      text += ")";
    }
    text += quantifier;
    // ICU's own possessive quantifiers repeat an empty match forever.
    if (possessive) {
      groups.insert(0, "(?>");
      text += ")";
    }
    grouped = possessive;
  }
  if (text.empty()) return absl::OkStatus();
  run_.remove();
  out_.insert(begin, groups);
  return Write(text);
}

}  // namespace

absl::StatusOr<std::string> TranslateRegex(std::string_view pattern) {
  return RegexTranslator(pattern).Run();
}

}  // namespace kvasir::model
