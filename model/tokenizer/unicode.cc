#include "model/tokenizer/unicode.h"

#include <unicode/bytestream.h>
#include <unicode/normalizer2.h>
#include <unicode/regex.h>
#include <unicode/stringpiece.h>
#include <unicode/uchar.h>
#include <unicode/unistr.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/string_view.h"
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

const icu::Normalizer2* Instance(NormalForm form, UErrorCode* code) {
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

}  // namespace

bool IsWhiteSpace(char32_t c) {
  return u_isUWhiteSpace(static_cast<UChar32>(c)) != 0;
}

bool IsPunctuation(char32_t c) {
  if (c < 0x80)
    return u_isgraph(static_cast<UChar32>(c)) &&
           !((c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') ||
             (c >= 'a' && c <= 'z'));
  return u_ispunct(static_cast<UChar32>(c)) != 0;
}

bool IsNumeric(char32_t c) {
  return (U_GET_GC_MASK(static_cast<UChar32>(c)) & U_GC_N_MASK) != 0;
}

bool IsLetter(char32_t c) {
  return (U_GET_GC_MASK(static_cast<UChar32>(c)) & U_GC_L_MASK) != 0;
}

bool IsWordChar(char32_t c) {
  const auto u = static_cast<UChar32>(c);
  constexpr uint32_t kMask = U_GC_M_MASK | U_GC_ND_MASK | U_GC_PC_MASK;
  return u_isUAlphabetic(u) || (U_GET_GC_MASK(u) & kMask) != 0 ||
         u_hasBinaryProperty(u, UCHAR_JOIN_CONTROL);
}

void AppendLower(char32_t c, std::string* out) {
  // U+0130 is the only character whose lower case, without context, has two
  // characters.
  if (c == 0x130) {
    out->append("i\xCC\x87");
    return;
  }
  AppendUtf8(static_cast<char32_t>(u_tolower(static_cast<UChar32>(c))), out);
}

absl::StatusOr<std::string> Normalize(NormalForm form, std::string_view text) {
  if (IsAscii(text)) return std::string(text);
  UErrorCode code = U_ZERO_ERROR;
  const icu::Normalizer2* normalizer = Instance(form, &code);
  if (U_FAILURE(code)) return IcuError("no normalization data", code);
  std::string out;
  icu::StringByteSink<std::string> sink(&out,
                                        static_cast<int32_t>(text.size()));
  normalizer->normalizeUTF8(0, Piece(text), sink, nullptr, code);
  if (U_FAILURE(code)) return IcuError("normalization", code);
  return out;
}

struct Regex::Impl {
  std::unique_ptr<icu::RegexPattern> pattern;
};

namespace {

// Translates a pattern from the file's dialect (Oniguruma, Ruby syntax) into
// ICU's. Refuses patterns that would compile but have another meaning.
class PatternTranslator {
 public:
  explicit PatternTranslator(std::string_view pattern) : in_(pattern) {}

  absl::StatusOr<std::string> Run() {
    while (at_ < in_.size()) {
      switch (in_[at_]) {
        case '\\':
          KVASIR_RETURN_IF_ERROR(Escape());
          break;
        case '(':
          KVASIR_RETURN_IF_ERROR(Group());
          break;
        case '}':
          // x{1,3}+ is a possessive quantifier in ICU, but in Ruby syntax it
          // repeats x{1,3}.
          if (in_.substr(at_, 2) == "}+") return Unsupported("}+");
          Copy(1);
          break;
        default:
          Copy(1);
      }
    }
    return std::move(out_);
  }

 private:
  void Copy(size_t count) {
    out_.append(in_.substr(at_, count));
    at_ += count;
  }

  void Replace(size_t count, std::string_view with) {
    out_.append(with);
    at_ += count;
  }

  absl::Status Unsupported(std::string_view what) const {
    return absl::UnimplementedError(absl::StrCat(
        "pattern \"", AbslView(in_.substr(0, 200)), "\" uses ", AbslView(what),
        " at byte ", at_, ", which is not supported"));
  }

  absl::Status Escape() {
    if (at_ + 1 == in_.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("pattern \"", AbslView(in_.substr(0, 200)),
                       "\" ends in a \\ that escapes nothing"));
    }
    const char c = in_[at_ + 1];
    switch (c) {
      // ICU's \s does not include U+000B and U+0085.
      case 's':
        Replace(2, "\\p{White_Space}");
        return absl::OkStatus();
      case 'S':
        Replace(2, "\\P{White_Space}");
        return absl::OkStatus();
      case 'v':  // \v is one character in the file's dialect, a class in ICU
        Replace(2, "\\x0b");
        return absl::OkStatus();
      case 'p':
      case 'P':
        return Braced();
      case 'x':
        if (in_.substr(at_ + 2, 1) == "{") return Braced();
        break;
      default:
        break;
    }
    const auto u = static_cast<unsigned char>(c);
    const bool letter_or_digit = (u >= '0' && u <= '9') ||
                                 (u >= 'A' && u <= 'Z') ||
                                 (u >= 'a' && u <= 'z');
    if (letter_or_digit &&
        std::string_view("dDwWrntfbBAzxu").find(c) == std::string_view::npos) {
      return Unsupported(in_.substr(at_, 2));
    }
    Copy(u < 0x80 ? 2 : 1);
    return absl::OkStatus();
  }

  // Copies the braces of \p{...} and \x{...}, so that they are not taken for a
  // quantifier like {1,3}.
  absl::Status Braced() {
    const size_t end = in_.find('}', at_);
    if (in_.substr(at_ + 2, 1) != "{" || end == std::string_view::npos) {
      return Unsupported(in_.substr(at_, 2));
    }
    Copy(end + 1 - at_);
    return absl::OkStatus();
  }

  absl::Status Group() {
    if (in_.substr(at_, 2) != "(?") {
      Copy(1);
      return absl::OkStatus();
    }
    for (const std::string_view known : {"(?:", "(?=", "(?!", "(?<=", "(?<!",
                                         "(?>", "(?i:", "(?i)", "(?-i:"}) {
      if (in_.substr(at_, known.size()) == known) {
        Copy(known.size());
        return absl::OkStatus();
      }
    }
    return Unsupported(in_.substr(at_, 4));
  }

  std::string_view in_;
  size_t at_ = 0;
  std::string out_;
};

constexpr size_t kMaxPatternBytes = 8192;

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
                          PatternTranslator(pattern).Run());
  UErrorCode code = U_ZERO_ERROR;
  UParseError where{};
  // In Ruby syntax, ^ and $ match at every line.
  auto impl = std::make_unique<Impl>();
  impl->pattern.reset(icu::RegexPattern::compile(
      icu::UnicodeString::fromUTF8(Piece(translated)), UREGEX_MULTILINE, where,
      code));
  if (U_FAILURE(code)) {
    return IcuError(absl::StrCat("pattern \"", pattern.substr(0, 200),
                                 "\" at character ", where.offset),
                    code);
  }
  return std::unique_ptr<Regex>(new Regex(pattern, std::move(impl)));
}

namespace {

// How often ICU may still call SpendTick during a search. It calls SpendTick
// about every 10,000 steps.
struct StepBudget {
  int64_t ticks_left = 0;
};

UBool SpendTick(const void* context, int32_t /*steps*/) {
  // ICU passes the context as const, but it is our own object.
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
  // Converts UTF-16 offsets into byte offsets by walking through both encodings
  // together.
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
  while (matcher.find(code)) {
    const size_t begin = bytes_at(matcher.start(code));
    matches->push_back({begin, bytes_at(matcher.end(code))});
  }
  if (U_FAILURE(code)) {
    return IcuError(
        absl::StrCat("pattern \"", impl_->regex->pattern().substr(0, 200),
                     "\" on a text of ", text.size(), " bytes"),
        code);
  }
  return absl::OkStatus();
}

}  // namespace kvasir::model
