// Compares sets and mappings with those of the reference implementation, over
// all code points (tests/golden/tokenizers/unicode.json).
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <string_view>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/sha256.h"
#include "base/status_matchers.h"
#include "gtest/gtest.h"
#include "model/tokenizer/char_sets.h"
#include "model/tokenizer/unicode.h"
#include "model/tokenizer/utf8.h"
#include "nlohmann/json.hpp"

namespace kvasir::model {
namespace {

constexpr char32_t kEnd = 0x110000;

bool IsSurrogate(char32_t c) { return c >= 0xD800 && c < 0xE000; }

const nlohmann::json& Recorded() {
  static const auto* const kRecorded = [] {
    const char* dir = std::getenv("KVASIR_SOURCE_DIR");
    std::ifstream file(std::filesystem::path(dir ? dir : ".") /
                       "tests/golden/tokenizers/unicode.json");
    return new nlohmann::json(nlohmann::json::parse(file));
  }();
  return *kRecorded;
}

std::string Digest(std::string_view lines) {
  return base::Sha256Hex(lines).substr(0, 16);
}

std::string DigestOfSet(const std::function<bool(char32_t)>& contains) {
  std::string lines;
  bool inside = false;
  for (char32_t c = 0; c <= kEnd; ++c) {
    const bool now = c < kEnd && !IsSurrogate(c) && contains(c);
    if (now == inside) continue;
    inside = now;
    if (now) {
      absl::StrAppendFormat(&lines, "%X-", static_cast<uint32_t>(c));
    } else {
      absl::StrAppendFormat(&lines, "%X\n", static_cast<uint32_t>(c) - 1);
    }
  }
  return Digest(lines);
}

std::string DigestOfSet(const icu::UnicodeSet& set) {
  return DigestOfSet(
      [&](char32_t c) { return set.contains(static_cast<UChar32>(c)) != 0; });
}

std::string DigestOfMapping(
    std::string_view before, std::string_view after,
    const std::function<std::string(const std::string&)>& map) {
  std::string lines;
  for (char32_t c = 0; c < kEnd; ++c) {
    if (IsSurrogate(c)) continue;
    std::string text(before);
    AppendUtf8(c, &text);
    text.append(after);
    const std::string mapped = map(text);
    if (mapped == text) continue;
    absl::StrAppendFormat(&lines, "%X %s\n", static_cast<uint32_t>(c),
                          absl::BytesToHexString(mapped));
  }
  return Digest(lines);
}

TEST(UnicodeGoldenTest,
     NamedSetsInPatternsHaveTheUnicodeVersionOfTheReference) {
  ASSERT_GE(Recorded()["properties"].size(), 80u);
  for (const auto& [name, digest] : Recorded()["properties"].items()) {
    KVASIR_ASSERT_OK_AND_ASSIGN(const auto set,
                                PropertySet(name, WordKind::kAlone));
    EXPECT_EQ(DigestOfSet(set), digest) << "\\p{" << name << "}";
  }
  ASSERT_EQ(Recorded()["posix"].size(), 14u);
  for (const auto& [name, digest] : Recorded()["posix"].items()) {
    KVASIR_ASSERT_OK_AND_ASSIGN(const auto set, PosixSet(name));
    EXPECT_EQ(DigestOfSet(set), digest) << "[[:" << name << ":]]";
  }
}

TEST(UnicodeGoldenTest,
     CharacterClassesOfPreTokenizersHaveTheReferencesUnicodeVersion) {
  const nlohmann::json& sets = Recorded()["sets"];
  EXPECT_EQ(DigestOfSet(IsPunctuation), sets["punctuation"]);
  EXPECT_EQ(DigestOfSet(IsNumeric), sets["numeric"]);
  EXPECT_EQ(DigestOfSet(IsWhiteSpace), sets["space"]);
  EXPECT_EQ(DigestOfSet(IsWordChar), sets["word"]);
  EXPECT_EQ(DigestOfSet(IsLetter), Recorded()["properties"]["L"]);
  EXPECT_EQ(DigestOfSet(IsNumber), Recorded()["properties"]["N"]);
}

TEST(UnicodeGoldenTest,
     MappingsOfNormalizersHaveTheUnicodeVersionOfTheReference) {
  const nlohmann::json& mappings = Recorded()["mappings"];
  const auto lower = [](const std::string& text) {
    std::string out;
    AppendLower(FirstChar(text).value, &out);
    return out;
  };
  EXPECT_EQ(DigestOfMapping("", "", lower), mappings["lower"]);
  struct Form {
    const char* name;
    NormalForm form;
  };
  for (const Form& form :
       {Form{"NFC", NormalForm::kNfc}, Form{"NFD", NormalForm::kNfd},
        Form{"NFKC", NormalForm::kNfkc}, Form{"NFKD", NormalForm::kNfkd}}) {
    const auto normalize = [&](const std::string& text) {
      return Normalize(form.form, text).value();
    };
    EXPECT_EQ(DigestOfMapping("", "", normalize), mappings[form.name])
        << form.name;
    EXPECT_EQ(DigestOfMapping("a\xCC\x81", "\xCC\xA3", normalize),
              mappings[absl::StrCat(form.name, " among marks")])
        << form.name;
  }
}

}  // namespace
}  // namespace kvasir::model
