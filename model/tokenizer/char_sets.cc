#include "model/tokenizer/char_sets.h"

#include <unicode/uchar.h>
#include <unicode/unistr.h>
#include <unicode/usetiter.h>

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/string_view.h"

namespace kvasir::model {
namespace {

// A set from a constant expression in ICU's notation.
icu::UnicodeSet Set(const char16_t* expression) {
  UErrorCode code = U_ZERO_ERROR;
  icu::UnicodeSet set(icu::UnicodeString(expression), code);
  KVASIR_CHECK(U_SUCCESS(code));
  return set;
}

struct NamedSet {
  std::string_view name;
  const char16_t* expression;
};

constexpr NamedSet kPosix[] = {
    {"alnum", u"[\\p{Alphabetic}\\p{Nd}]"},
    {"alpha", u"[\\p{Alphabetic}]"},
    {"ascii", u"[\\u0000-\\u007F]"},
    {"blank", u"[\\p{Zs}\\t]"},
    {"cntrl", u"[\\p{Cc}]"},
    {"digit", u"[\\p{Nd}]"},
    {"graph", u"[^\\p{White_Space}\\p{Cc}\\p{Cn}\\p{Cs}]"},
    {"lower", u"[\\p{Lowercase}]"},
    {"print", u"[[^\\p{White_Space}\\p{Cc}\\p{Cn}\\p{Cs}]\\p{Zs}]"},
    {"punct", u"[\\p{P}\\p{S}]"},
    {"space", u"[\\p{White_Space}]"},
    {"upper", u"[\\p{Uppercase}]"},
    {"xdigit", u"[0-9A-Fa-f]"},
    {"word", u"[\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}]"},
};

std::string Lower(std::string_view name) {
  std::string lower;
  for (const char c : name) {
    if (c == ' ' || c == '-' || c == '_') continue;
    lower.push_back(c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a')
                                         : c);
  }
  return lower;
}

absl::Status Unknown(std::string_view name) {
  return absl::UnimplementedError(
      absl::StrCat("the character property ", base::AbslView(name)));
}

// All sequences of characters that equal one character without regard to case.
const icu::UnicodeSet& FoldsOfOneChar() {
  static const auto* const kFolds = [] {
    auto* folds = new icu::UnicodeSet(Set(u"[\\p{CWCF}]"));
    folds->closeOver(USET_CASE_INSENSITIVE);
    return folds;
  }();
  return *kFolds;
}

}  // namespace

const icu::UnicodeSet& WordChars(WordSet set) {
  static const auto* const kBracketed =
      new icu::UnicodeSet(Set(u"[\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}]"));
  static const auto* const kAlone = [] {
    auto* alone = new icu::UnicodeSet(*kBracketed);
    alone->addAll(Set(u"[\\u00B2\\u00B3\\u00B9\\u00BC-\\u00BE]"));
    return alone;
  }();
  return set == WordSet::kAlone ? *kAlone : *kBracketed;
}

absl::StatusOr<icu::UnicodeSet> PosixSet(std::string_view name) {
  for (const NamedSet& posix : kPosix) {
    if (posix.name == name) return Set(posix.expression);
  }
  return Unknown(name);
}

absl::StatusOr<icu::UnicodeSet> PropertySet(std::string_view name,
                                            WordSet words) {
  const std::string key = Lower(name);
  if (key == "word") return WordChars(words);
  if (key == "punct") return Set(u"[\\p{P}]");  // unlike [[:punct:]]
  if (auto posix = PosixSet(key); posix.ok()) return posix;
  if (key == "any") return Set(u"[\\u0000-\\U0010FFFF]");
  if (key == "assigned") return Set(u"[^\\p{Cn}]");
  UErrorCode code = U_ZERO_ERROR;
  icu::UnicodeSet set;
  for (const UProperty property : {UCHAR_GENERAL_CATEGORY_MASK, UCHAR_SCRIPT}) {
    const int32_t value = u_getPropertyValueEnum(property, key.c_str());
    if (value == UCHAR_INVALID_CODE) continue;
    set.applyIntPropertyValue(property, value, code);
    if (U_SUCCESS(code)) return set;
  }
  const UProperty property = u_getPropertyEnum(key.c_str());
  if (property >= UCHAR_BINARY_START && property < UCHAR_BINARY_LIMIT) {
    set.applyIntPropertyValue(property, 1, code);
    if (U_SUCCESS(code)) return set;
  }
  return Unknown(name);
}

bool AddOtherCases(icu::UnicodeSet* set) {
  set->closeOver(USET_CASE_INSENSITIVE);
  const bool single = !set->hasStrings();
  set->removeAllStrings();
  return single;
}

bool EndsInFoldOfOneChar(const icu::UnicodeString& text) {
  for (const int32_t size : {2, 3}) {
    const int32_t begin = text.moveIndex32(text.length(), -size);
    if (text.countChar32(begin) < size) break;
    icu::UnicodeString end = text.tempSubString(begin);
    if (FoldsOfOneChar().contains(end.foldCase())) return true;
  }
  return false;
}

}  // namespace kvasir::model
