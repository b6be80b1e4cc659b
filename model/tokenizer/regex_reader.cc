#include "model/tokenizer/regex_reader.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/string_view.h"
#include "model/tokenizer/utf8.h"

namespace kvasir::model {
namespace {

using base::AbslView;
using icu::UnicodeSet;

bool IsOctal(char c) { return c >= '0' && c <= '7'; }
bool IsDigit(char c) { return c >= '0' && c <= '9'; }
bool IsHex(char c) {
  return absl::ascii_isxdigit(static_cast<unsigned char>(c));
}

UnicodeSet EveryChar() { return UnicodeSet(0, 0x10FFFF); }
UnicodeSet Without(const UnicodeSet& set) {
  UnicodeSet rest = EveryChar();
  rest.removeAll(set);
  return rest;
}

}  // namespace

bool RegexReader::Take(std::string_view text) {
  if (!Sees(text)) return false;
  at_ += text.size();
  return true;
}

absl::Status RegexReader::Unsupported(std::string_view what) const {
  return absl::UnimplementedError(Text(absl::StrCat(
      "uses ", AbslView(what), " at byte ", at_, ", which is not supported")));
}

absl::Status RegexReader::Invalid(std::string_view what) const {
  return absl::InvalidArgumentError(
      Text(absl::StrCat("has ", AbslView(what), " at byte ", at_)));
}

// The excerpts of the pattern in this text may end inside a character, so
// invalid UTF-8 is replaced.
std::string RegexReader::Text(std::string_view what) const {
  return ReplaceInvalidUtf8(absl::StrCat(
      "pattern \"", AbslView(in_.substr(0, 200)), "\" ", AbslView(what)));
}

absl::StatusOr<char32_t> RegexReader::OneChar() {
  const Utf8Char c = FirstChar(in_.substr(at_));
  if (c.kind != Utf8Kind::kValid) return Invalid("bytes that are not UTF-8");
  at_ += c.size;
  return c.value;
}

absl::StatusOr<CharItem> RegexReader::CharEscape(WordKind words) {
  if (at_ + 1 >= in_.size()) return Invalid("a \\ that escapes nothing");
  const char c = Next(1);
  CharItem item;
  const auto set = [&](const UnicodeSet& chars, bool negated) {
    at_ += 2;
    item.set = negated ? Without(chars) : chars;
    return item;
  };
  const auto one = [&](char32_t value) {
    at_ += 2;
    item.one_char = true;
    item.value = value;
    return item;
  };
  switch (c) {
    case 'w':
    case 'W':
      return set(WordChars(words), c == 'W');
    case 'd':
    case 'D':
      return set(*PosixSet("digit"), c == 'D');
    case 's':
    case 'S':
      return set(*PosixSet("space"), c == 'S');
    case 'h':
    case 'H':
      return set(*PosixSet("xdigit"), c == 'H');
    case 'p':
    case 'P':
      return Property(words);
    case 'x':
    case 'u':
      return HexEscape();
    case '0': {
      char32_t value = 0;
      size_t size = 2;
      for (; size < 4 && IsOctal(Next(size)); ++size) {
        value = value * 8 + static_cast<char32_t>(Next(size) - '0');
      }
      at_ += size - 2;
      return one(value);
    }
    case 't':
      return one('\t');
    case 'n':
      return one('\n');
    case 'r':
      return one('\r');
    case 'f':
      return one('\f');
    case 'v':
      return one('\v');
    case 'a':
      return one('\a');
    case 'e':
      return one(0x1B);
    default:
      break;
  }
  if (absl::ascii_isalnum(static_cast<unsigned char>(c))) {
    return Unsupported(in_.substr(at_, 2));
  }
  ++at_;
  KVASIR_ASSIGN_OR_RETURN(item.value, OneChar());
  item.one_char = true;
  return item;
}

absl::StatusOr<CharItem> RegexReader::Property(WordKind words) {
  const size_t end = in_.find('}', at_);
  if (Next(2) != '{' || end == std::string_view::npos) {
    return Unsupported(absl::StrCat(AbslView(in_.substr(at_, 2)),
                                    " without a name in braces"));
  }
  std::string_view name = in_.substr(at_ + 3, end - at_ - 3);
  bool negated = Next(1) == 'P';
  if (!name.empty() && name[0] == '^') {
    negated = !negated;
    name.remove_prefix(1);
  }
  auto set = PropertySet(name.substr(0, 100), words);
  if (!set.ok()) {
    return Unsupported(absl::StrCat(set.status().message()));
  }
  at_ = end + 1;
  CharItem item;
  item.set = negated ? Without(*set) : *std::move(set);
  return item;
}

absl::StatusOr<CharItem> RegexReader::HexEscape() {
  const bool braces = Next(1) == 'x' && Next(2) == '{';
  const bool byte = Next(1) == 'x' && !braces;
  size_t end = at_ + (braces ? 3 : 2);
  const size_t most = end + (braces ? 8 : byte ? 2 : 4);
  char32_t value = 0;
  const size_t begin = end;
  for (; end < std::min(in_.size(), most) && IsHex(in_[end]); ++end) {
    const char c = in_[end];
    value = value * 16 +
            static_cast<char32_t>(IsDigit(c) ? c - '0' : (c | 0x20) - 'a' + 10);
  }
  const std::string_view text = in_.substr(at_, end + 1 - at_);
  if (end == begin || (braces && (end == in_.size() || in_[end] != '}')) ||
      (!braces && !byte && end < most)) {
    return Unsupported(absl::StrCat(
        AbslView(text), ", which is not the number of a character,"));
  }
  if (byte && value >= 0x80) {
    return Unsupported(
        absl::StrCat(AbslView(in_.substr(at_, 4)),
                     ", a byte that is not a character (write \\x{...}),"));
  }
  if (value > 0x10FFFF || (value >= 0xD800 && value <= 0xDFFF)) {
    return Unsupported(absl::StrCat(
        AbslView(text), ", which is not the number of a character,"));
  }
  at_ = braces ? end + 1 : end;
  CharItem item;
  item.one_char = true;
  item.value = value;
  return item;
}

absl::StatusOr<CharItem> RegexReader::Posix() {
  CharItem item;
  const size_t end = in_.find(":]", at_);
  std::string_view name =
      in_.substr(at_ + 2, std::min(end, in_.size()) - at_ - 2);
  bool negated = false;
  if (!name.empty() && name[0] == '^') {
    negated = true;
    name.remove_prefix(1);
  }
  auto set = PosixSet(name.substr(0, 20));
  if (end == std::string_view::npos || !set.ok()) {
    return Unsupported(
        absl::StrCat("the POSIX class ", AbslView(in_.substr(at_, 20))));
  }
  at_ = end + 2;
  item.set = negated ? Without(*set) : *std::move(set);
  return item;
}

absl::StatusOr<CharItem> RegexReader::BracketItem() {
  CharItem item;
  if (Sees("[:")) return Posix();
  if (Next() == '[') {
    KVASIR_ASSIGN_OR_RETURN(item.set, NestedBrackets(false, false));
    return item;
  }
  if (Next() != '\\') {
    KVASIR_ASSIGN_OR_RETURN(item.value, OneChar());
    item.one_char = true;
    return item;
  }
  if (Next(1) != 'b') return CharEscape(WordKind::kInBrackets);
  at_ += 2;
  item.value = '\b';
  item.one_char = true;
  return item;
}

absl::StatusOr<UnicodeSet> RegexReader::NestedBrackets(bool outermost,
                                                       bool ignore_case) {
  if (++depth_ > kMaxRegexDepth) {
    return Invalid(absl::StrCat("brackets inside more than ", kMaxRegexDepth,
                                " others, the limit,"));
  }
  ++at_;
  const bool negated = Take("^");
  UnicodeSet result =
      EveryChar();  // the intersection of all operands of && that were read
  UnicodeSet operand;
  enum { kStart, kChar, kRange, kSet } before = kStart;
  char32_t last = 0;  // if `before` is kChar
  for (bool first = true; first || Next() != ']'; first = false) {
    if (at_ >= in_.size()) return Invalid("[ without ]");
    if (Take("&&")) {
      result.retainAll(operand);
      operand.clear();
      before = kStart;
      continue;
    }
    const bool dash = Next() == '-' && Next(1) != ']' && before != kStart;
    if (dash && before != kChar) {
      return Unsupported("- after a range or a class of characters");
    }
    if (dash) ++at_;
    if (dash && (Next() == '[' || Sees("&&"))) {
      return Unsupported("a range that does not end in a character");
    }
    KVASIR_ASSIGN_OR_RETURN(const CharItem item, BracketItem());
    if (!dash) {
      if (item.one_char) {
        operand.add(static_cast<UChar32>(item.value));
      } else {
        operand.addAll(item.set);
      }
      before = item.one_char ? kChar : kSet;
      last = item.value;
      continue;
    }
    if (!item.one_char)
      return Unsupported("a range that does not end in a character");
    if (item.value < last) return Invalid("a range that ends before it begins");
    operand.add(static_cast<UChar32>(last), static_cast<UChar32>(item.value));
    before = kRange;
  }
  ++at_;
  --depth_;
  result.retainAll(operand);
  if (outermost && ignore_case && !AddOtherCases(&result) && !negated) {
    return Unsupported(
        "a class with a character that equals several others if case is "
        "ignored, like \xC3\x9F and ss,");
  }
  if (!outermost && negated && result.contains(0x80, 0x10FFFF)) {
    return Unsupported(
        "[^...] inside another class, excluding all characters beyond ASCII,");
  }
  return negated ? Without(result) : result;
}

absl::StatusOr<UnicodeSet> RegexReader::Brackets(bool ignore_case) {
  return NestedBrackets(/*outermost=*/true, ignore_case);
}

}  // namespace kvasir::model
