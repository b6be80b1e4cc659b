#include "base/log.h"

#include "base/status_matchers.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace kvasir::base {
namespace {

TEST(LogTest, TextFormatQuotesOnlyValuesThatNeedQuotes) {
  EXPECT_EQ(FormatLogEvent(LogFormat::kText, "request",
                           {{"id", "a-1"},
                            {"n", 3},
                            {"note", "two words"},
                            {"ok", true},
                            {"seconds", 0.5}}),
            "request id=a-1 n=3 note=\"two words\" ok=true seconds=0.5");
}

TEST(LogTest, AJsonLineIsOneParsableObjectEvenWithInvalidUtf8) {
  const std::string line = "{" + FormatLogEvent(LogFormat::kJson, "re\"quest",
                                                {{"id", "\xff\n"}, {"n", -1}});
  const nlohmann::json json = nlohmann::json::parse(line);
  EXPECT_EQ(json["message"], "re\"quest");
  EXPECT_EQ(json["id"], "\uFFFD\n");
  EXPECT_EQ(json["n"], -1);
}

TEST(LogTest, AFieldWithALineBreakIsLoggedInOneLine) {
  EXPECT_EQ(FormatLogEvent(LogFormat::kText, "x", {{"id", "a\nb"}}),
            "x id=\"a\\nb\"");
}

// Regression test: a client once sent a model name of a megabyte of control
// characters, and escaping it made a log line of six megabytes.
TEST(LogTest, ALongTextOfAClientIsTruncatedBeforeItIsEscaped) {
  const std::string name(1 << 20, '\x01');
  for (const LogFormat format : {LogFormat::kText, LogFormat::kJson}) {
    const std::string line = FormatLogEvent(format, "x", {{"model", name}});
    EXPECT_LT(line.size(), 6 * kMaxLogFieldBytes + 100);
    EXPECT_THAT(line, ::testing::HasSubstr("... (1048576 bytes)"));
    EXPECT_GT(FormatLogEvent(format, "x", {{"plan", LogWhole{name}}}).size(),
              name.size());
  }
}

TEST(LogTest, ControlCharactersInLoggedTextAreEscaped) {
  EXPECT_EQ(Printable("a\x1b[31m\rb\x7f\xc2\x9b"
                      "2J"),
            "a\\x1b[31m\\x0db\\x7f\\u009b2J");
  // Words of any language, line breaks and tabs stay as they are.
  EXPECT_EQ(Printable("k\u00e4se\n\t\u4e2d \xc2\xa0"),
            "k\u00e4se\n\t\u4e2d \xc2\xa0");
  EXPECT_EQ(FormatLogEvent(LogFormat::kText, "x",
                           {{"id",
                             "a\xc2\x9b"
                             "2J"}}),
            "x id=\"a\\u009b2J\"");
}

TEST(LogTest, AnUnknownLogFormatOrLevelIsNamedInTheError) {
  LogFormat format;
  LogLevel level;
  EXPECT_THAT(ParseLogFormat("xml", &format),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       ::testing::HasSubstr("'xml'")));
  EXPECT_THAT(ParseLogLevel("loud", &level),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       ::testing::HasSubstr("'loud'")));
}

}  // namespace
}  // namespace kvasir::base
