#include "model/tokenizer/precompiled_rules.h"

#include <unicode/ubrk.h>
#include <unicode/utext.h>

#include <algorithm>
#include <memory>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "model/tokenizer/utf8.h"

namespace kvasir::model {
namespace {

// Longer graphemes are never replaced as a whole, only character by character.
constexpr size_t kMaxGraphemeBytes = 5;

uint32_t ReadLittleEndian(std::string_view bytes) {
  uint32_t value = 0;
  for (size_t i = 4; i > 0; --i) {
    value = value << 8 | static_cast<uint8_t>(bytes[i - 1]);
  }
  return value;
}

// A unit of the double-array trie holds either a label and the distance to its
// child units, or a value.
uint32_t Label(uint32_t unit) { return unit & 0x800000FF; }
uint32_t Distance(uint32_t unit) {
  return (unit >> 10) << ((unit & (1U << 9)) >> 6);
}
bool HasValue(uint32_t unit) { return (unit >> 8 & 1) == 1; }
uint32_t Value(uint32_t unit) { return unit & 0x7FFFFFFF; }

// The graphemes of a UTF-8 text.
class Graphemes {
 public:
  static absl::StatusOr<std::unique_ptr<Graphemes>> Of(std::string_view text) {
    // ICU's positions have 32 bits.
    if (text.size() > INT32_MAX) {
      return absl::InvalidArgumentError(
          absl::StrCat("cannot divide a text of ", text.size(),
                       " bytes into graphemes: the limit is ", INT32_MAX));
    }
    std::unique_ptr<Graphemes> result(new Graphemes);
    UErrorCode error = U_ZERO_ERROR;
    result->text_.reset(utext_openUTF8(
        nullptr, text.data(), static_cast<int64_t>(text.size()), &error));
    result->breaks_.reset(ubrk_open(UBRK_CHARACTER, "", nullptr, 0, &error));
    if (U_SUCCESS(error)) {
      ubrk_setUText(result->breaks_.get(), result->text_.get(), &error);
    }
    if (U_FAILURE(error)) {
      return absl::InternalError(
          absl::StrCat("ICU cannot find graphemes: ", u_errorName(error)));
    }
    return result;
  }

  // Returns the end of the next grapheme, or -1 at the end of the text.
  int32_t NextEnd() { return ubrk_next(breaks_.get()); }

 private:
  struct Close {
    void operator()(UText* text) const { utext_close(text); }
    void operator()(UBreakIterator* breaks) const { ubrk_close(breaks); }
  };

  Graphemes() = default;
  std::unique_ptr<UText, Close> text_;
  std::unique_ptr<UBreakIterator, Close> breaks_;
};

}  // namespace

absl::StatusOr<PrecompiledRules> PrecompiledRules::FromBytes(
    std::string_view bytes) {
  const size_t trie_bytes = bytes.size() < 4 ? 0 : ReadLittleEndian(bytes);
  if (trie_bytes == 0 || trie_bytes % 4 != 0 || trie_bytes > bytes.size() - 4) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the rules have ", bytes.size(), " bytes and a trie of ", trie_bytes,
        "; the trie must have a positive multiple of 4 bytes, and at least 4 "
        "bytes less than the rules"));
  }
  PrecompiledRules rules;
  for (size_t at = 4; at < 4 + trie_bytes; at += 4) {
    rules.trie_.push_back(ReadLittleEndian(bytes.substr(at)));
  }
  rules.texts_ = bytes.substr(4 + trie_bytes);
  if (!IsValidUtf8(rules.texts_)) {
    return absl::InvalidArgumentError("the texts of the rules are not UTF-8");
  }
  return rules;
}

std::optional<size_t> PrecompiledRules::Find(std::string_view part) const {
  size_t at = Distance(trie_[0]);
  for (const char c : part) {
    const auto byte = static_cast<uint8_t>(c);
    if (byte == 0) return std::nullopt;
    at ^= byte;
    if (at >= trie_.size() || Label(trie_[at]) != byte) return std::nullopt;
    const uint32_t unit = trie_[at];
    at ^= Distance(unit);
    if (!HasValue(unit)) continue;
    if (at >= trie_.size()) return std::nullopt;
    return Value(trie_[at]);
  }
  return std::nullopt;
}

absl::StatusOr<std::string> PrecompiledRules::Apply(std::string_view text,
                                                    size_t max_bytes) const {
  KVASIR_ASSIGN_OR_RETURN(const auto graphemes, Graphemes::Of(text));
  std::string out;
  // Appends the replacement of `part`, if it has one.
  const auto replace = [&](std::string_view part) -> absl::StatusOr<bool> {
    const auto begin = Find(part);
    if (!begin) return false;
    if (*begin > texts_.size() ||
        (*begin < texts_.size() &&
         (static_cast<uint8_t>(texts_[*begin]) & 0xC0) == 0x80)) {
      return absl::InvalidArgumentError(
          absl::StrCat("a rule of the tokenizer's precompiled_charsmap points "
                       "to byte ",
                       *begin, " of its ", texts_.size(),
                       " bytes of texts, where no character begins"));
    }
    const size_t end = texts_.find('\0', *begin);
    const size_t size = std::min(end, texts_.size()) - *begin;
    if (out.size() + size > max_bytes) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the tokenizer's precompiled_charsmap makes more than the limit of ",
          max_bytes, " bytes from a text of ", text.size(), " bytes"));
    }
    out.append(texts_, *begin, size);
    return true;
  };
  size_t done = 0;
  for (int32_t end; (end = graphemes->NextEnd()) >= 0;) {
    std::string_view rest = text.substr(done, static_cast<size_t>(end) - done);
    done = static_cast<size_t>(end);
    if (rest.size() <= kMaxGraphemeBytes) {
      KVASIR_ASSIGN_OR_RETURN(const bool replaced, replace(rest));
      if (replaced) continue;
    }
    while (!rest.empty()) {
      const std::string_view character = rest.substr(0, FirstChar(rest).size);
      rest.remove_prefix(character.size());
      KVASIR_ASSIGN_OR_RETURN(const bool replaced, replace(character));
      if (!replaced) out.append(character);
    }
  }
  return out;
}

}  // namespace kvasir::model
