// Sets of characters as in the reference implementation (Hugging Face
// tokenizers). Its libraries use the tables of several Unicode versions, none
// of which is ICU's:
// - regular expressions, words and graphemes: 16.0 (Oniguruma 6.9.10,
//   regex-syntax 0.8.8, unicode-segmentation 1.12.0);
// - numerals and lower case: 17.0 (the standard library of Rust);
// - normal forms: 9.0 (unicode-normalization-alignments 0.1.12);
// - punctuation: 8.0 (unicode_categories 0.1.1).
// The sets here are the same with every ICU that has Unicode 15.0 or later.
// Threads: immutable, so any thread may use them.
#pragma once

#include <unicode/uchar.h>
#include <unicode/uniset.h>
#include <unicode/uscript.h>

#include <cstdint>
#include <optional>

namespace kvasir::model {

// Returns a copy that is fast to search and lives until the process ends.
const icu::UnicodeSet* Frozen(const icu::UnicodeSet& set);

// Makes a set from a constant expression in ICU's notation.
icu::UnicodeSet SetOf(const char16_t* expression);

// Unicode 16.0: all characters whose general category is in `mask`, a sum
// of U_GC_*_MASK.
icu::UnicodeSet CategorySet(uint32_t mask);

// Unicode 16.0: the characters of a script. Unicode 15.0 must have the script.
icu::UnicodeSet ScriptSet(UScriptCode script);

// Unicode 16.0: the characters that have a binary property. Nullopt if this
// file's tables do not cover the property.
std::optional<icu::UnicodeSet> BinarySet(UProperty property);

// Unicode 16.0: the characters that \w matches inside brackets.
icu::UnicodeSet WordSet();

// Unicode 17.0: category N.
icu::UnicodeSet NumericSet();
// Unicode 17.0: the lower case of one character, except U+0130.
char32_t LowerOf(char32_t c);
// Unicode 16.0: adds to `set` all other cases of its characters. Also adds
// strings of several characters that equal one of them if case is ignored, as
// ss equals U+00DF.
void CloseOverCase(icu::UnicodeSet* set);

// Unicode 9.0: all characters that exist in it. Normal forms leave characters
// of later versions unchanged.
icu::UnicodeSet NormalizedSet();

// Unicode 8.0: category P.
icu::UnicodeSet PunctuationSet();

}  // namespace kvasir::model
