#include "model/tokenizer/char_sets.h"

#include <unicode/uchar.h>
#include <unicode/unistr.h>
#include <unicode/usetiter.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/string_view.h"
#include "model/tokenizer/reference_unicode.h"

namespace kvasir::model {
namespace {

struct NamedSet {
  std::string_view name;
  uint32_t categories = 0;
  std::optional<UProperty> property;
  const char16_t* more = u"[]";
};

constexpr uint32_t kGraph = U_GC_L_MASK | U_GC_M_MASK | U_GC_N_MASK |
                            U_GC_P_MASK | U_GC_S_MASK | U_GC_CF_MASK |
                            U_GC_CO_MASK;
constexpr NamedSet kPosix[] = {
    {.name = "alnum", .categories = U_GC_ND_MASK, .property = UCHAR_ALPHABETIC},
    {.name = "alpha", .property = UCHAR_ALPHABETIC},
    {.name = "ascii", .more = u"[\\u0000-\\u007F]"},
    {.name = "blank", .categories = U_GC_ZS_MASK, .more = u"[\\t]"},
    {.name = "cntrl", .categories = U_GC_CC_MASK},
    {.name = "digit", .categories = U_GC_ND_MASK},
    {.name = "graph", .categories = kGraph},
    {.name = "lower", .property = UCHAR_LOWERCASE},
    {.name = "print", .categories = kGraph | U_GC_ZS_MASK},
    {.name = "punct", .categories = U_GC_P_MASK | U_GC_S_MASK},
    {.name = "space", .property = UCHAR_WHITE_SPACE},
    {.name = "upper", .property = UCHAR_UPPERCASE},
    {.name = "xdigit", .more = u"[0-9A-Fa-f]"},
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

// All strings of several characters that equal a single character if case
// is ignored.
const icu::UnicodeSet& FoldsOfOneChar() {
  static const auto* const kFolds = [] {
    auto* folds = new icu::UnicodeSet(SetOf(u"[\\p{CWCF}]"));
    folds->closeOver(USET_CASE_INSENSITIVE);
    return folds;
  }();
  return *kFolds;
}

}  // namespace

const icu::UnicodeSet& WordChars(WordKind kind) {
  static const auto* const kAlone = [] {
    auto* alone = new icu::UnicodeSet(WordSet());
    alone->addAll(SetOf(u"[\\u00B2\\u00B3\\u00B9\\u00BC-\\u00BE]"));
    return alone;
  }();
  static const auto* const kInBrackets = new icu::UnicodeSet(WordSet());
  return kind == WordKind::kAlone ? *kAlone : *kInBrackets;
}

absl::StatusOr<icu::UnicodeSet> PosixSet(std::string_view name) {
  if (name == "word") return WordChars(WordKind::kInBrackets);
  for (const NamedSet& posix : kPosix) {
    if (posix.name != name) continue;
    icu::UnicodeSet set = SetOf(posix.more);
    if (posix.property) set.addAll(BinarySet(*posix.property).value());
    if (posix.categories != 0) set.addAll(CategorySet(posix.categories));
    return set;
  }
  return Unknown(name);
}

absl::StatusOr<icu::UnicodeSet> PropertySet(std::string_view name,
                                            WordKind words) {
  const std::string key = Lower(name);
  if (key == "word") return WordChars(words);
  if (key == "punct") return CategorySet(U_GC_P_MASK);  // unlike [[:punct:]]
  if (auto posix = PosixSet(key); posix.ok()) return posix;
  if (key == "any") return icu::UnicodeSet(0, 0x10FFFF);
  if (key == "assigned") return CategorySet(~uint32_t{U_GC_CN_MASK});
  const int32_t mask =
      u_getPropertyValueEnum(UCHAR_GENERAL_CATEGORY_MASK, key.c_str());
  if (mask != UCHAR_INVALID_CODE) {
    return CategorySet(static_cast<uint32_t>(mask));
  }
  const int32_t script = u_getPropertyValueEnum(UCHAR_SCRIPT, key.c_str());
  if (script != UCHAR_INVALID_CODE) {
    auto set = ScriptSet(static_cast<UScriptCode>(script));
    if (!set.isEmpty()) return set;
  }
  auto binary = BinarySet(u_getPropertyEnum(key.c_str()));
  if (binary) return *std::move(binary);
  return Unknown(name);
}

bool AddOtherCases(icu::UnicodeSet* set) {
  CloseOverCase(set);
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
