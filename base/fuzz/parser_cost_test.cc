#include "base/fuzz/parser_cost.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvasir::base {
namespace {

constexpr size_t kBytes = 100'000;
constexpr uint64_t kWorkPerByte = 100;

void Parse(const std::string& input,
           absl::FunctionRef<void(std::string_view)> parse) {
  ParseAtLinearCost(reinterpret_cast<const uint8_t*>(input.data()),
                    input.size(), kWorkPerByte, parse);
}

std::string Repeat(std::string_view head, std::string_view unit,
                   std::string_view tail) {
  std::string input = absl::StrCat(std::string(kRepeat), kBytes, "\n");
  for (const std::string_view part :
       {head, kSeparator, unit, kSeparator, tail}) {
    input.append(part);
  }
  return input;
}

TEST(ParserCostTest, AnInputThatDoesNotBeginWithRepeatIsItselfTheText) {
  std::string text;
  Parse("{}", [&](std::string_view given) { text = given; });
  EXPECT_EQ(text, "{}");
}

TEST(ParserCostTest, EachCopyOfTheUnitContainsItsNumber) {
  std::string text;
  Parse(Repeat("{", "\"##\":1,", "}"),
        [&](std::string_view given) { text = given; });
  EXPECT_EQ(text.substr(0, 22), "{\"00\":1,\"01\":1,\"02\":1,");
  EXPECT_EQ(text.back(), '}');
  EXPECT_GE(text.size(), kBytes);
  EXPECT_LE(text.size(), kBytes + 8);
}

TEST(ParserCostTest, AMissingHeadUnitOrTailCountsAsEmpty) {
  for (const char* rest :
       {"", "x", "9", "9\n", "9\na", "9\na\n--\n", "9\na\n--\n\n--\n"}) {
    Parse(std::string(kRepeat) + rest,
          [](std::string_view text) { EXPECT_LE(text.size(), 1u); });
  }
}

// Compares each byte with every 128th earlier byte.
void ParseInQuadraticTime(std::string_view text) {
  volatile uint32_t found = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    for (size_t j = 0; j < i; j += 128) found = found + (text[i] == text[j]);
  }
}

// Copies the whole text for every 32nd byte.
void CopyAgainAndAgain(std::string_view text) {
  for (size_t i = 0; i < text.size(); i += 32) {
    std::vector<char> copy(text.begin(), text.end());
    ASSERT_EQ(copy.size(), text.size());
  }
}

TEST(ParserCostDeathTest, ParseAtLinearCostAbortsIfTheWorkIsQuadratic) {
  const std::string input = Repeat("", "a", "");
  EXPECT_DEATH(Parse(input, ParseInQuadraticTime), "is not linear");
  EXPECT_DEATH(Parse(input, CopyAgainAndAgain), "is not linear");
}

}  // namespace
}  // namespace kvasir::base
