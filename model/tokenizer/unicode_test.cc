#include "model/tokenizer/unicode.h"

#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "model/tokenizer/utf8.h"
#include "model/tokenizer/word_scanner.h"

namespace kvasir::model {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

std::string Drained(InvalidUnit unit, const std::string& bytes) {
  // Feeding single bytes must give the same result as feeding the whole text.
  std::string pending;
  std::string out;
  for (const char byte : bytes) {
    pending.push_back(byte);
    DrainUtf8(unit, &pending, &out);
    EXPECT_LE(pending.size(), 3u);
    EXPECT_TRUE(IsValidUtf8(out));
  }
  FinishUtf8(unit, &pending, &out);
  std::string whole = bytes;
  std::string at_once;
  FinishUtf8(unit, &whole, &at_once);
  EXPECT_EQ(out, at_once);
  return out;
}

TEST(Utf8Test, EachMaximalInvalidByteSequenceBecomesOneReplacementCharacter) {
  const std::string r(kReplacement);
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", ""},
      {"a\xC3\xA9\xE6\xB2\xB3\xF0\x9F\x99\x82",
       "a\xC3\xA9\xE6\xB2\xB3\xF0\x9F\x99\x82"},
      {"\x80", r},
      {"\xC3", r},
      {"\xC3(", r + "("},
      {"\xC0\xAF", r + r},                  // overlong
      {"\xE0\x80\xAF", r + r + r},          // overlong
      {"\xED\xA0\x80", r + r + r},          // surrogate
      {"\xF4\x90\x80\x80", r + r + r + r},  // above U+10FFFF
      {"\xF0\x9F\x99", r},                  // one truncated character
      {"\xF0\x9F\x99x", r + "x"},
      {"\xE6\xB2\xE6\xB2\xB3", r + "\xE6\xB2\xB3"},
      {"\xFF\xFE", r + r},
  };
  for (const auto& [bytes, want] : cases) {
    EXPECT_EQ(ReplaceInvalidUtf8(bytes), want) << testing::PrintToString(bytes);
    EXPECT_EQ(Drained(InvalidUnit::kSubsequence, bytes), want);
    EXPECT_EQ(IsValidUtf8(bytes), bytes == want);
  }
}

TEST(Utf8Test, EveryInvalidByteCanBeReplacedSeparately) {
  const std::string r(kReplacement);
  EXPECT_EQ(Drained(InvalidUnit::kByte, "\xF0\x9F\x99"), r + r + r);
  EXPECT_EQ(Drained(InvalidUnit::kByte, "\xE6\xB2\xE6\xB2\xB3"),
            r + r + "\xE6\xB2\xB3");
}

TEST(Utf8Test, EveryCodePointSurvivesARoundTripThroughUtf8) {
  for (char32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    std::string text;
    AppendUtf8(c, &text);
    const Utf8Char back = FirstChar(text);
    ASSERT_EQ(back.kind, Utf8Kind::kValid) << uint32_t{c};
    ASSERT_EQ(back.value, c);
    ASSERT_EQ(back.size, text.size());
  }
}

TEST(Utf8Test, EveryByteSurvivesARoundTripThroughTheByteLevelAlphabet) {
  std::string all;
  for (int b = 0; b < 256; ++b) all.push_back(static_cast<char>(b));
  std::string written;
  AppendByteLevel(all, &written);
  EXPECT_TRUE(IsValidUtf8(written));
  EXPECT_EQ(BytesOfByteLevel(written), all);
  EXPECT_EQ(BytesOfByteLevel("\xC4\xA0hi"), " hi");  // Ġhi
  EXPECT_EQ(BytesOfByteLevel("a b"), std::nullopt);
}

std::vector<std::string> Found(const std::string& pattern,
                               const std::string& text) {
  auto regex = Regex::Compile(pattern);
  KVASIR_EXPECT_OK(regex);
  std::vector<TextRange> ranges;
  KVASIR_EXPECT_OK(RegexMatcher(**regex).FindAll(text, &ranges));
  std::vector<std::string> found;
  for (const TextRange& r : ranges) {
    found.push_back(text.substr(r.begin, r.end - r.begin));
  }
  return found;
}

TEST(RegexTest, MatchOffsetsAreInBytesForCharactersOfAnyLength) {
  EXPECT_THAT(Found("[b-d]",
                    "b\xC3\xA9"
                    "c\xE6\xB2\xB3"
                    "d\xF0\x9F\x99\x82"
                    "b"),
              ElementsAre("b", "c", "d", "b"));
  EXPECT_THAT(Found("\\p{L}+", "\xC3\xA9t\xC3\xA9 \xF0\x9D\x94\x98x"),
              ElementsAre("\xC3\xA9t\xC3\xA9", "\xF0\x9D\x94\x98x"));
}

TEST(RegexTest, TheWhiteSpaceClassIncludesVerticalTabAndNextLine) {
  EXPECT_THAT(Found("\\s+",
                    "a\x0B\xC2\x85"
                    "b"),
              ElementsAre("\x0B\xC2\x85"));
  EXPECT_THAT(Found("[^\\s]+",
                    "a\x0B"
                    "b"),
              ElementsAre("a", "b"));
  EXPECT_THAT(Found("\\S",
                    "\xC2\x85"
                    "b"),
              ElementsAre("b"));
}

TEST(RegexTest, RefusesPatternsThatAreEmptyOrTooLong) {
  for (const size_t size : {0, 8193}) {
    EXPECT_THAT(Regex::Compile(std::string(size, 'a')),
                base::StatusIs(
                    Code::kInvalidArgument,
                    HasSubstr(std::to_string(size) + " bytes, but must have")));
  }
}

TEST(RegexTest, AMatchThatWouldTakeExponentialTimeIsStopped) {
  auto regex = Regex::Compile("(?:a|aa)+(?:a|aa)+(?:a|aa)+b");
  KVASIR_ASSERT_OK(regex);
  std::vector<TextRange> ranges;
  EXPECT_THAT(RegexMatcher(**regex).FindAll(std::string(200, 'a'), &ranges),
              base::StatusIs(Code::kInvalidArgument, HasSubstr("200 bytes")));
}

// Returns a random text of characters for which the patterns have rules.
std::string RandomText(std::mt19937& random) {
  static const std::vector<std::string> parts = {"'",
                                                 "s",
                                                 "S",
                                                 "t",
                                                 "re",
                                                 "LL",
                                                 "ve",
                                                 "m",
                                                 "d",
                                                 "\xC5\xBF",
                                                 "x",
                                                 " ",
                                                 " ",
                                                 "  ",
                                                 "\t",
                                                 "\n",
                                                 "\r",
                                                 "\r\n",
                                                 "\x0B",
                                                 "\xC2\x85",
                                                 "\xC2\xA0",
                                                 "\xE3\x80\x80",
                                                 "1",
                                                 "23",
                                                 "4567",
                                                 "\xD9\xA3",
                                                 "\xC2\xBD",
                                                 ".",
                                                 "!?",
                                                 "_",
                                                 "\xE2\x80\x99",
                                                 "\xC3\xA9",
                                                 "e\xCC\x81",
                                                 "\xCC\x81",
                                                 "\xE6\xB2\xB3",
                                                 "\xF0\x9F\x99\x82",
                                                 "\xF0\x9D\x94\x98",
                                                 "\xE2\x80\x8D",
                                                 std::string(1, '\0'),
                                                 "\xF4\x8F\xBF\xBF",
                                                 "\xE1\x85\xA0",
                                                 "\xE2\x84\xAA"};
  std::string text;
  const size_t count = random() % 24;
  for (size_t i = 0; i < count; ++i) text += parts[random() % parts.size()];
  return text;
}

TEST(WordScannerTest, FindsTheSameWordsAsTheRegularExpression) {
  const std::string llama3 =
      R"re((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)re";
  std::string qwen2 = llama3;
  qwen2.replace(qwen2.find("{1,3}"), 5, "");
  for (const std::string& pattern :
       {std::string(kGpt2Pattern), llama3, qwen2}) {
    const auto scanner = WordScanner::ForPattern(pattern);
    ASSERT_TRUE(scanner.has_value()) << pattern;
    auto regex = Regex::Compile(pattern);
    KVASIR_ASSERT_OK(regex);
    RegexMatcher matcher(**regex);
    std::mt19937 random(7);
    for (int i = 0; i < 20000; ++i) {
      const std::string text = RandomText(random);
      std::vector<TextRange> fast;
      std::vector<TextRange> slow;
      scanner->FindAll(text, &fast);
      KVASIR_ASSERT_OK(matcher.FindAll(text, &slow));
      ASSERT_EQ(fast.size(), slow.size()) << testing::PrintToString(text);
      for (size_t k = 0; k < fast.size(); ++k) {
        ASSERT_EQ(fast[k].begin, slow[k].begin) << testing::PrintToString(text);
        ASSERT_EQ(fast[k].end, slow[k].end) << testing::PrintToString(text);
      }
    }
  }
  EXPECT_FALSE(WordScanner::ForPattern(llama3 + "|x").has_value());
}

}  // namespace
}  // namespace kvasir::model
