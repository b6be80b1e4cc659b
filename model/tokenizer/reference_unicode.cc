#include "model/tokenizer/reference_unicode.h"

#include <unicode/unistr.h>

#include "base/check.h"

namespace kvasir::model {
namespace {

// The characters that Unicode 15.1 and 16.0 added.
struct AddedRange {
  UChar32 begin;
  UChar32 end;  // included
  uint32_t category;
  UScriptCode script;  // USCRIPT_UNKNOWN: one that Unicode 15.0 lacks
};
constexpr AddedRange kAdded[] = {
    {0x897, 0x897, U_GC_MN_MASK, USCRIPT_ARABIC},
    {0x1B4E, 0x1B4F, U_GC_PO_MASK, USCRIPT_BALINESE},
    {0x1B7F, 0x1B7F, U_GC_PO_MASK, USCRIPT_BALINESE},
    {0x1C89, 0x1C89, U_GC_LU_MASK, USCRIPT_CYRILLIC},
    {0x1C8A, 0x1C8A, U_GC_LL_MASK, USCRIPT_CYRILLIC},
    {0x2427, 0x2429, U_GC_SO_MASK, USCRIPT_COMMON},
    {0x2FFC, 0x2FFF, U_GC_SO_MASK, USCRIPT_COMMON},
    {0x31E4, 0x31E5, U_GC_SO_MASK, USCRIPT_COMMON},
    {0x31EF, 0x31EF, U_GC_SO_MASK, USCRIPT_COMMON},
    {0xA7CB, 0xA7CC, U_GC_LU_MASK, USCRIPT_LATIN},
    {0xA7CD, 0xA7CD, U_GC_LL_MASK, USCRIPT_LATIN},
    {0xA7DA, 0xA7DA, U_GC_LU_MASK, USCRIPT_LATIN},
    {0xA7DB, 0xA7DB, U_GC_LL_MASK, USCRIPT_LATIN},
    {0xA7DC, 0xA7DC, U_GC_LU_MASK, USCRIPT_LATIN},
    {0x105C0, 0x105F3, U_GC_LO_MASK, USCRIPT_UNKNOWN},
    {0x10D40, 0x10D49, U_GC_ND_MASK, USCRIPT_UNKNOWN},
    {0x10D4A, 0x10D4D, U_GC_LO_MASK, USCRIPT_UNKNOWN},
    {0x10D4E, 0x10D4E, U_GC_LM_MASK, USCRIPT_UNKNOWN},
    {0x10D4F, 0x10D4F, U_GC_LO_MASK, USCRIPT_UNKNOWN},
    {0x10D50, 0x10D65, U_GC_LU_MASK, USCRIPT_UNKNOWN},
    {0x10D69, 0x10D6D, U_GC_MN_MASK, USCRIPT_UNKNOWN},
    {0x10D6E, 0x10D6E, U_GC_PD_MASK, USCRIPT_UNKNOWN},
    {0x10D6F, 0x10D6F, U_GC_LM_MASK, USCRIPT_UNKNOWN},
    {0x10D70, 0x10D85, U_GC_LL_MASK, USCRIPT_UNKNOWN},
    {0x10D8E, 0x10D8F, U_GC_SM_MASK, USCRIPT_UNKNOWN},
    {0x10EC2, 0x10EC4, U_GC_LO_MASK, USCRIPT_ARABIC},
    {0x10EFC, 0x10EFC, U_GC_MN_MASK, USCRIPT_ARABIC},
    {0x11380, 0x11389, U_GC_LO_MASK, USCRIPT_UNKNOWN},
    {0x1138B, 0x1138B, U_GC_LO_MASK, USCRIPT_UNKNOWN},
    {0x1138E, 0x1138E, U_GC_LO_MASK, USCRIPT_UNKNOWN},
    {0x11390, 0x113B5, U_GC_LO_MASK, USCRIPT_UNKNOWN},
    {0x113B7, 0x113B7, U_GC_LO_MASK, USCRIPT_UNKNOWN},
    {0x113B8, 0x113BA, U_GC_MC_MASK, USCRIPT_UNKNOWN},
    {0x113BB, 0x113C0, U_GC_MN_MASK, USCRIPT_UNKNOWN},
    {0x113C2, 0x113C2, U_GC_MC_MASK, USCRIPT_UNKNOWN},
    {0x113C5, 0x113C5, U_GC_MC_MASK, USCRIPT_UNKNOWN},
    {0x113C7, 0x113CA, U_GC_MC_MASK, USCRIPT_UNKNOWN},
    {0x113CC, 0x113CD, U_GC_MC_MASK, USCRIPT_UNKNOWN},
    {0x113CE, 0x113CE, U_GC_MN_MASK, USCRIPT_UNKNOWN},
    {0x113CF, 0x113CF, U_GC_MC_MASK, USCRIPT_UNKNOWN},
    {0x113D0, 0x113D0, U_GC_MN_MASK, USCRIPT_UNKNOWN},
    {0x113D1, 0x113D1, U_GC_LO_MASK, USCRIPT_UNKNOWN},
    {0x113D2, 0x113D2, U_GC_MN_MASK, USCRIPT_UNKNOWN},
    {0x113D3, 0x113D3, U_GC_LO_MASK, USCRIPT_UNKNOWN},
    {0x113D4, 0x113D5, U_GC_PO_MASK, USCRIPT_UNKNOWN},
    {0x113D7, 0x113D8, U_GC_PO_MASK, USCRIPT_UNKNOWN},
    {0x113E1, 0x113E2, U_GC_MN_MASK, USCRIPT_UNKNOWN},
    {0x116D0, 0x116E3, U_GC_ND_MASK, USCRIPT_MYANMAR},
    {0x11BC0, 0x11BE0, U_GC_LO_MASK, USCRIPT_UNKNOWN},
    {0x11BE1, 0x11BE1, U_GC_PO_MASK, USCRIPT_UNKNOWN},
    {0x11BF0, 0x11BF9, U_GC_ND_MASK, USCRIPT_UNKNOWN},
    {0x11F5A, 0x11F5A, U_GC_MN_MASK, USCRIPT_KAWI},
    {0x13460, 0x143FA, U_GC_LO_MASK, USCRIPT_EGYPTIAN_HIEROGLYPHS},
    {0x16100, 0x1611D, U_GC_LO_MASK, USCRIPT_UNKNOWN},
    {0x1611E, 0x16129, U_GC_MN_MASK, USCRIPT_UNKNOWN},
    {0x1612A, 0x1612C, U_GC_MC_MASK, USCRIPT_UNKNOWN},
    {0x1612D, 0x1612F, U_GC_MN_MASK, USCRIPT_UNKNOWN},
    {0x16130, 0x16139, U_GC_ND_MASK, USCRIPT_UNKNOWN},
    {0x16D40, 0x16D42, U_GC_LM_MASK, USCRIPT_UNKNOWN},
    {0x16D43, 0x16D6A, U_GC_LO_MASK, USCRIPT_UNKNOWN},
    {0x16D6B, 0x16D6C, U_GC_LM_MASK, USCRIPT_UNKNOWN},
    {0x16D6D, 0x16D6F, U_GC_PO_MASK, USCRIPT_UNKNOWN},
    {0x16D70, 0x16D79, U_GC_ND_MASK, USCRIPT_UNKNOWN},
    {0x18CFF, 0x18CFF, U_GC_LO_MASK, USCRIPT_KHITAN_SMALL_SCRIPT},
    {0x1CC00, 0x1CCEF, U_GC_SO_MASK, USCRIPT_COMMON},
    {0x1CCF0, 0x1CCF9, U_GC_ND_MASK, USCRIPT_COMMON},
    {0x1CD00, 0x1CEB3, U_GC_SO_MASK, USCRIPT_COMMON},
    {0x1E5D0, 0x1E5ED, U_GC_LO_MASK, USCRIPT_UNKNOWN},
    {0x1E5EE, 0x1E5EF, U_GC_MN_MASK, USCRIPT_UNKNOWN},
    {0x1E5F0, 0x1E5F0, U_GC_LO_MASK, USCRIPT_UNKNOWN},
    {0x1E5F1, 0x1E5FA, U_GC_ND_MASK, USCRIPT_UNKNOWN},
    {0x1E5FF, 0x1E5FF, U_GC_PO_MASK, USCRIPT_UNKNOWN},
    {0x1F8B2, 0x1F8BB, U_GC_SO_MASK, USCRIPT_COMMON},
    {0x1F8C0, 0x1F8C1, U_GC_SO_MASK, USCRIPT_COMMON},
    {0x1FA89, 0x1FA89, U_GC_SO_MASK, USCRIPT_COMMON},
    {0x1FA8F, 0x1FA8F, U_GC_SO_MASK, USCRIPT_COMMON},
    {0x1FABE, 0x1FABE, U_GC_SO_MASK, USCRIPT_COMMON},
    {0x1FAC6, 0x1FAC6, U_GC_SO_MASK, USCRIPT_COMMON},
    {0x1FADC, 0x1FADC, U_GC_SO_MASK, USCRIPT_COMMON},
    {0x1FADF, 0x1FADF, U_GC_SO_MASK, USCRIPT_COMMON},
    {0x1FAE9, 0x1FAE9, U_GC_SO_MASK, USCRIPT_COMMON},
    {0x1FBCB, 0x1FBEF, U_GC_SO_MASK, USCRIPT_COMMON},
    {0x2EBF0, 0x2EE5D, U_GC_LO_MASK, USCRIPT_HAN},
};

// Characters that have another category in Unicode 16.0 than in 15.0.
constexpr AddedRange kChanged[] = {
    {0x1171E, 0x1171E, U_GC_MC_MASK, USCRIPT_AHOM},
};

// The characters that Unicode 15.1 and 16.0 added to binary properties, except
// for letters. The category of an added letter determines whether it is
// alphabetic, upper case or lower case.
struct PropertyRange {
  UProperty property;
  const char16_t* added;
};
constexpr PropertyRange kProperties[] = {
    {UCHAR_ALPHABETIC,
     u"[\u0363-\u036F\u0897\u1DD3-\u1DE6\U00010D69\U00010EFC"
     u"\U000113B8-\U000113C0\U000113C2\U000113C5\U000113C7-\U000113CA"
     u"\U000113CC\U000113CD\U0001611E-\U0001612E]"},
    {UCHAR_LOWERCASE, u"[]"},
    {UCHAR_UPPERCASE, u"[]"},
    {UCHAR_IDEOGRAPHIC, u"[\U00018CFF\U0002EBF0-\U0002EE5D]"},
    {UCHAR_UNIFIED_IDEOGRAPH, u"[\U0002EBF0-\U0002EE5D]"},
    {UCHAR_EMOJI,
     u"[\U0001FA89\U0001FA8F\U0001FABE\U0001FAC6\U0001FADC\U0001FADF"
     u"\U0001FAE9]"},
    {UCHAR_EMOJI_PRESENTATION,
     u"[\U0001FA89\U0001FA8F\U0001FABE\U0001FAC6\U0001FADC\U0001FADF"
     u"\U0001FAE9]"},
    {UCHAR_EMOJI_MODIFIER, u"[]"},
    {UCHAR_EMOJI_MODIFIER_BASE, u"[]"},
    {UCHAR_EMOJI_COMPONENT, u"[]"},
    {UCHAR_EXTENDED_PICTOGRAPHIC, u"[]"},
    {UCHAR_REGIONAL_INDICATOR, u"[]"},
    {UCHAR_VARIATION_SELECTOR, u"[]"},
    {UCHAR_JOIN_CONTROL, u"[]"},
    {UCHAR_QUOTATION_MARK, u"[]"},
    {UCHAR_HEX_DIGIT, u"[]"},
    {UCHAR_ASCII_HEX_DIGIT, u"[]"},
    {UCHAR_WHITE_SPACE, u"[]"},
};

// Pairs of upper and lower case that later versions than Unicode 15.0 added.
struct CaseRange {
  char32_t begin;
  char32_t end;  // included
  char32_t lower;
  int version;
};
constexpr CaseRange kCases[] = {
    {0x1C89, 0x1C89, 0x1C8A, 16},    {0xA7CB, 0xA7CB, 0x264, 16},
    {0xA7CC, 0xA7CC, 0xA7CD, 16},    {0xA7CE, 0xA7CE, 0xA7CF, 17},
    {0xA7D2, 0xA7D2, 0xA7D3, 17},    {0xA7D4, 0xA7D4, 0xA7D5, 17},
    {0xA7DA, 0xA7DA, 0xA7DB, 16},    {0xA7DC, 0xA7DC, 0x19B, 16},
    {0x10D50, 0x10D65, 0x10D70, 16}, {0x16EA0, 0x16EB8, 0x16EBB, 17},
};

// The characters of Unicode 15.0.
const icu::UnicodeSet& BaseSet() {
  static const icu::UnicodeSet* const kSet = Frozen(SetOf(u"[\\p{Age=15.0}]"));
  return *kSet;
}

// The characters that Unicode 16.0 does not have.
icu::UnicodeSet UnassignedSet() {
  icu::UnicodeSet set;
  set.addAll(BaseSet());  // not copied, because a copy would be frozen as well
  for (const AddedRange& range : kAdded) set.add(range.begin, range.end);
  return set.complement();
}

}  // namespace

const icu::UnicodeSet* Frozen(const icu::UnicodeSet& set) {
  return (new icu::UnicodeSet(set))->freeze();
}

icu::UnicodeSet SetOf(const char16_t* expression) {
  UErrorCode code = U_ZERO_ERROR;
  icu::UnicodeSet set(icu::UnicodeString(expression), code);
  KVASIR_CHECK(U_SUCCESS(code));
  return set;
}

icu::UnicodeSet CategorySet(uint32_t mask) {
  UErrorCode code = U_ZERO_ERROR;
  icu::UnicodeSet set;
  set.applyIntPropertyValue(UCHAR_GENERAL_CATEGORY_MASK,
                            static_cast<int32_t>(mask), code);
  KVASIR_CHECK(U_SUCCESS(code));
  set.retainAll(BaseSet());
  for (const AddedRange& range : kAdded) {
    if ((range.category & mask) != 0) set.add(range.begin, range.end);
  }
  for (const AddedRange& range : kChanged) {
    set.remove(range.begin, range.end);
    if ((range.category & mask) != 0) set.add(range.begin, range.end);
  }
  if ((mask & U_GC_CN_MASK) != 0) set.addAll(UnassignedSet());
  return set;
}

icu::UnicodeSet ScriptSet(UScriptCode script) {
  UErrorCode code = U_ZERO_ERROR;
  icu::UnicodeSet set;
  set.applyIntPropertyValue(UCHAR_SCRIPT, script, code);
  KVASIR_CHECK(U_SUCCESS(code));
  set.retainAll(BaseSet());
  if (script == USCRIPT_UNKNOWN) return set.addAll(UnassignedSet());
  for (const AddedRange& range : kAdded) {
    if (range.script == script) set.add(range.begin, range.end);
  }
  return set;
}

std::optional<icu::UnicodeSet> BinarySet(UProperty property) {
  for (const PropertyRange& row : kProperties) {
    if (row.property != property) continue;
    UErrorCode code = U_ZERO_ERROR;
    icu::UnicodeSet set;
    set.applyIntPropertyValue(property, 1, code);
    KVASIR_CHECK(U_SUCCESS(code));
    // This property also has characters that no version assigns yet.
    if (property != UCHAR_EXTENDED_PICTOGRAPHIC) set.retainAll(BaseSet());
    set.addAll(SetOf(row.added));
    const uint32_t categories = property == UCHAR_ALPHABETIC  ? U_GC_L_MASK
                                : property == UCHAR_LOWERCASE ? U_GC_LL_MASK
                                : property == UCHAR_UPPERCASE ? U_GC_LU_MASK
                                                              : 0;
    for (const AddedRange& range : kAdded) {
      if ((range.category & categories) != 0) set.add(range.begin, range.end);
    }
    return set;
  }
  return std::nullopt;
}

icu::UnicodeSet WordSet() {
  icu::UnicodeSet set = *BinarySet(UCHAR_ALPHABETIC);
  return set.addAll(CategorySet(U_GC_M_MASK | U_GC_ND_MASK | U_GC_PC_MASK));
}

icu::UnicodeSet NumericSet() {
  icu::UnicodeSet set = CategorySet(U_GC_N_MASK);
  return set.add(0x11DE0, 0x11DE9).add(0x16FF4, 0x16FF6);
}

char32_t LowerOf(char32_t c) {
  for (const CaseRange& range : kCases) {
    if (c >= range.begin && c <= range.end) {
      return range.lower + (c - range.begin);
    }
  }
  return static_cast<char32_t>(u_tolower(static_cast<UChar32>(c)));
}

void CloseOverCase(icu::UnicodeSet* set) {
  set->closeOver(USET_CASE_INSENSITIVE);
  for (const CaseRange& range : kCases) {
    if (range.version > 16) continue;
    for (char32_t c = range.begin; c <= range.end; ++c) {
      const auto upper = static_cast<UChar32>(c);
      const auto lower = static_cast<UChar32>(LowerOf(c));
      if (set->contains(upper)) set->add(lower);
      if (set->contains(lower)) set->add(upper);
    }
  }
}

icu::UnicodeSet NormalizedSet() { return SetOf(u"[\\p{Age=9.0}]"); }

icu::UnicodeSet PunctuationSet() {
  // In Unicode 8.0, U+166D and U+111C9 were punctuation; later versions changed
  // their category.
  return SetOf(u"[[\\p{P}&\\p{Age=8.0}]\\u166D\\U000111C9]");
}

}  // namespace kvasir::model
