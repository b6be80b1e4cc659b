#include "model/tokenizer/unicode.h"

#include <unicode/bytestream.h>
#include <unicode/normalizer2.h>
#include <unicode/regex.h>
#include <unicode/stringpiece.h>
#include <unicode/uchar.h>
#include <unicode/uniset.h>
#include <unicode/unistr.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/string_view.h"
#include "model/tokenizer/reference_unicode.h"
#include "model/tokenizer/regex_syntax.h"
#include "model/tokenizer/utf8.h"

namespace kvasir::model {
namespace {

using base::AbslView;

icu::StringPiece Piece(std::string_view text) {
  return icu::StringPiece(text.data(), static_cast<int32_t>(text.size()));
}

absl::Status IcuError(std::string_view what, UErrorCode code) {
  return absl::InvalidArgumentError(
      absl::StrCat(AbslView(what), ": ", u_errorName(code)));
}

bool IsAscii(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) {
    return static_cast<unsigned char>(c) < 0x80;
  });
}

const icu::Normalizer2* NewestInstance(NormalForm form, UErrorCode* code) {
  switch (form) {
    case NormalForm::kNfc:
      return icu::Normalizer2::getNFCInstance(*code);
    case NormalForm::kNfd:
      return icu::Normalizer2::getNFDInstance(*code);
    case NormalForm::kNfkc:
      return icu::Normalizer2::getNFKCInstance(*code);
    case NormalForm::kNfkd:
      return icu::Normalizer2::getNFKDInstance(*code);
  }
  return nullptr;
}

// Leaves characters unchanged that do not exist in Unicode 9.0, the version of
// the reference implementation.
struct NormalizerOf {
  explicit NormalizerOf(NormalForm form) {
    const icu::Normalizer2* newest = NewestInstance(form, &code);
    if (U_FAILURE(code)) return;
    static const auto* const kSet = Frozen(NormalizedSet());
    normalizer = std::make_unique<icu::FilteredNormalizer2>(*newest, *kSet);
  }
  UErrorCode code = U_ZERO_ERROR;
  std::unique_ptr<icu::FilteredNormalizer2> normalizer;
};

const NormalizerOf& Instance(NormalForm form) {
  static const NormalizerOf kNfc(NormalForm::kNfc);
  static const NormalizerOf kNfd(NormalForm::kNfd);
  static const NormalizerOf kNfkc(NormalForm::kNfkc);
  static const NormalizerOf kNfkd(NormalForm::kNfkd);
  switch (form) {
    case NormalForm::kNfc:
      return kNfc;
    case NormalForm::kNfd:
      return kNfd;
    case NormalForm::kNfkc:
      return kNfkc;
    case NormalForm::kNfkd:
      break;
  }
  return kNfkd;
}

}  // namespace

bool IsWhiteSpace(char32_t c) {
  return u_isUWhiteSpace(static_cast<UChar32>(c)) != 0;
}

size_t SpaceEnd(std::string_view text, size_t begin) {
  while (begin < text.size()) {
    const Utf8Char c = FirstChar(text.substr(begin));
    if (!IsWhiteSpace(c.value)) break;
    begin += c.size;
  }
  return begin;
}

size_t SpaceBegin(std::string_view text, size_t end, size_t least) {
  while (end > least) {
    const size_t begin = PreviousCharBegin(text, end);
    if (!IsWhiteSpace(FirstChar(text.substr(begin)).value)) break;
    end = begin;
  }
  return std::max(end, least);
}

bool IsPunctuation(char32_t c) {
  if (c < 0x80)
    return u_isgraph(static_cast<UChar32>(c)) &&
           !((c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') ||
             (c >= 'a' && c <= 'z'));
  static const auto* const kSet = Frozen(PunctuationSet());
  return kSet->contains(static_cast<UChar32>(c)) != 0;
}

bool IsNumeric(char32_t c) {
  static const auto* const kSet = Frozen(NumericSet());
  return kSet->contains(static_cast<UChar32>(c)) != 0;
}

bool IsNumber(char32_t c) {
  static const auto* const kSet = Frozen(CategorySet(U_GC_N_MASK));
  return kSet->contains(static_cast<UChar32>(c)) != 0;
}

bool IsLetter(char32_t c) {
  static const auto* const kSet = Frozen(CategorySet(U_GC_L_MASK));
  return kSet->contains(static_cast<UChar32>(c)) != 0;
}

bool IsWordChar(char32_t c) {
  static const auto* const kSet = Frozen(WordSet().add(0x200C, 0x200D));
  return kSet->contains(static_cast<UChar32>(c)) != 0;
}

void AppendLower(char32_t c, std::string* out) {
  // U+0130 is the only character whose lower case, without context, has
  // two characters.
  if (c == 0x130) {
    out->append("i\xCC\x87");
    return;
  }
  AppendUtf8(LowerOf(c), out);
}

absl::StatusOr<std::string> Normalize(NormalForm form, std::string_view text) {
  if (IsAscii(text)) return std::string(text);
  const NormalizerOf& instance = Instance(form);
  if (U_FAILURE(instance.code)) {
    return IcuError("no normalization data", instance.code);
  }
  UErrorCode code = U_ZERO_ERROR;
  std::string out;
  icu::StringByteSink<std::string> sink(&out,
                                        static_cast<int32_t>(text.size()));
  instance.normalizer->normalizeUTF8(0, Piece(text), sink, nullptr, code);
  if (U_FAILURE(code)) return IcuError("normalization", code);
  return out;
}

struct Regex::Impl {
  std::unique_ptr<icu::RegexPattern> pattern;
};

namespace {

constexpr size_t kMaxPatternBytes = 8192;

// Returns the beginning of a pattern for error messages, as valid UTF-8.
std::string Shown(const std::string& pattern) {
  return ReplaceInvalidUtf8(pattern.substr(0, 200));
}

}  // namespace

Regex::Regex(std::string pattern, std::unique_ptr<Impl> impl)
    : pattern_(std::move(pattern)), impl_(std::move(impl)) {}
Regex::~Regex() = default;

absl::StatusOr<std::unique_ptr<Regex>> Regex::Compile(
    const std::string& pattern) {
  if (pattern.empty() || pattern.size() > kMaxPatternBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("the pattern has ", pattern.size(),
                     " bytes, but must have 1 to ", kMaxPatternBytes));
  }
  KVASIR_ASSIGN_OR_RETURN(const std::string translated,
                          TranslateRegex(pattern));
  UErrorCode code = U_ZERO_ERROR;
  UParseError where{};
  auto impl = std::make_unique<Impl>();
  impl->pattern.reset(icu::RegexPattern::compile(
      icu::UnicodeString::fromUTF8(Piece(translated)), 0, where, code));
  if (code == U_REGEX_LOOK_BEHIND_LIMIT) {
    return absl::UnimplementedError(
        absl::StrCat("pattern \"", Shown(pattern),
                     "\" uses a look-behind whose match has no maximum length, "
                     "which is not supported"));
  }
  if (U_FAILURE(code)) {
    return IcuError(absl::StrCat("pattern \"", Shown(pattern), "\""), code);
  }
  return std::unique_ptr<Regex>(new Regex(pattern, std::move(impl)));
}

namespace {

// Limits the steps of a search. ICU calls SpendTick about every 10,000 steps,
// and ends the search when no ticks are left.
struct StepBudget {
  int64_t ticks_left = 0;
};

UBool SpendTick(const void* context, int32_t /*steps*/) {
  // ICU passes the context as const, but it is the StepBudget that FindAll
  // has made.
  auto* budget = static_cast<StepBudget*>(const_cast<void*>(context));
  return --budget->ticks_left >= 0;
}

// The limit for the steps of a search is linear in the text's length, because
// reasonable patterns take linear time. This constant is added for short texts.
constexpr int64_t kBaseTicks = 20;
constexpr int64_t kCharsPerTick = 64;

}  // namespace

struct RegexMatcher::Impl {
  const Regex* regex;
  std::unique_ptr<icu::RegexMatcher> matcher;
  UErrorCode code = U_ZERO_ERROR;
  icu::UnicodeString text;
  StepBudget budget;
};

RegexMatcher::RegexMatcher(const Regex& regex)
    : impl_(std::make_unique<Impl>()) {
  impl_->regex = &regex;
  impl_->matcher.reset(regex.impl_->pattern->matcher(impl_->code));
  if (U_SUCCESS(impl_->code)) {
    impl_->matcher->setMatchCallback(SpendTick, &impl_->budget, impl_->code);
  }
}
RegexMatcher::~RegexMatcher() = default;

absl::Status RegexMatcher::FindAll(std::string_view text,
                                   std::vector<TextRange>* matches) {
  if (U_FAILURE(impl_->code)) return IcuError("regex matcher", impl_->code);
  UErrorCode code = U_ZERO_ERROR;
  impl_->text = icu::UnicodeString::fromUTF8(Piece(text));
  impl_->budget.ticks_left = kBaseTicks + impl_->text.length() / kCharsPerTick;
  icu::RegexMatcher& matcher = *impl_->matcher;
  matcher.reset(impl_->text);
  // Converts UTF-16 offsets into byte offsets by walking through both
  // encodings together.
  size_t byte = 0;
  int32_t unit = 0;
  const auto bytes_at = [&](int32_t target) {
    while (unit < target) {
      const auto lead = static_cast<unsigned char>(text[byte]);
      const size_t size = lead < 0x80   ? 1
                          : lead < 0xE0 ? 2
                          : lead < 0xF0 ? 3
                                        : 4;
      byte += size;
      unit += size == 4 ? 2 : 1;
    }
    return byte;
  };
  int32_t done = -1;  // the end of the previous match
  while (matcher.find(code)) {
    const int32_t begin = matcher.start(code);
    // Like the reference implementation, leaves out an empty match directly
    // after another match.
    if (begin == done && begin == matcher.end(code)) continue;
    done = matcher.end(code);
    const size_t first = bytes_at(begin);
    matches->push_back({first, bytes_at(done)});
  }
  if (U_FAILURE(code)) {
    return IcuError(absl::StrCat("pattern \"", Shown(impl_->regex->pattern()),
                                 "\" on a text of ", text.size(), " bytes"),
                    code);
  }
  return absl::OkStatus();
}

}  // namespace kvasir::model
