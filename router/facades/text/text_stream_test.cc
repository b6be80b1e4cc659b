#include "router/facades/text/text_stream.h"

#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "router/testing/kserve_testing.h"

namespace kvasir::router {
namespace {

struct Result {
  std::string text;
  size_t num_used = 0;
  bool stopped = false;
  bool operator==(const Result&) const = default;
};

std::ostream& operator<<(std::ostream& out, const Result& result) {
  return out << "'" << result.text << "' after " << result.num_used
             << (result.stopped ? ", stopped" : "");
}

// Pushes `text`, in which each byte is a token. The i-th call of Push gets
// sizes[i] tokens; the last size is repeated.
Result Decode(const std::string& text, const TextStreamOptions& options,
              const std::vector<size_t>& sizes) {
  TextStream stream(std::make_unique<ByteDetokenizer>(), options);
  const std::vector<int32_t> ids = ByteCodec::Ids(text);
  Result result;
  size_t at = 0;
  for (size_t i = 0; at < ids.size(); ++i) {
    const size_t size =
        std::min(sizes[std::min(i, sizes.size() - 1)], ids.size() - at);
    const TextStream::Piece piece =
        stream.Push(std::span(ids).subspan(at, size));
    result.text += piece.text;
    result.num_used += piece.num_used;
    at += size;
  }
  result.text += stream.Finish();
  result.stopped = stream.stopped();
  return result;
}

TextStreamOptions Stops(std::vector<std::string> stops) {
  TextStreamOptions options;
  options.stop_strings = std::move(stops);
  return options;
}

TEST(TextStreamTest, WithoutStopStringsTextIsReleasedAtOnce) {
  TextStream stream(std::make_unique<ByteDetokenizer>(), {});
  const std::vector<int32_t> ids = ByteCodec::Ids("ab");
  EXPECT_EQ(stream.Push(ids).text, "ab");
  EXPECT_EQ(stream.Finish(), "");
}

TEST(TextStreamTest, TextThatMayBecomeAStopStringIsHeldBack) {
  TextStream stream(std::make_unique<ByteDetokenizer>(), Stops({"END"}));
  EXPECT_EQ(stream.Push(ByteCodec::Ids("abEN")).text, "ab");
  EXPECT_EQ(stream.Push(ByteCodec::Ids("X")).text, "ENX");
  EXPECT_EQ(stream.Push(ByteCodec::Ids("EN")).text, "");
  EXPECT_EQ(stream.Finish(), "EN");
  EXPECT_FALSE(stream.stopped());
}

TEST(TextStreamTest, AStopStringSplitAcrossTwoPushesEndsTheText) {
  TextStream stream(std::make_unique<ByteDetokenizer>(), Stops({"END"}));
  EXPECT_EQ(stream.Push(ByteCodec::Ids("abE")).text, "ab");
  const TextStream::Piece piece = stream.Push(ByteCodec::Ids("NDxyz"));
  EXPECT_EQ(piece.text, "");
  EXPECT_EQ(piece.num_used, 2u);
  EXPECT_TRUE(stream.stopped());
  EXPECT_EQ(stream.Push(ByteCodec::Ids("more")).num_used, 0u);
  EXPECT_EQ(stream.Finish(), "");
}

TEST(TextStreamTest, TheLongestOfTheStopStringsThatAreCompleteFirstMatches) {
  EXPECT_EQ(Decode("xabcd", Stops({"abcd", "bc"}), {5}),
            (Result{"xa", 4, true}));
  EXPECT_EQ(Decode("xabc", Stops({"bc", "abc"}), {4}), (Result{"x", 4, true}));
}

TEST(TextStreamTest, AStopStringStaysInTheTextIfTheRequestIncludesIt) {
  TextStreamOptions options = Stops({"\n\n"});
  options.include_stop_string = true;
  EXPECT_EQ(Decode("a\n\nb", options, {1}), (Result{"a\n\n", 3, true}));
}

TEST(TextStreamTest, TextOfTheFirstMinTokensIsNotSearchedForStopStrings) {
  TextStreamOptions options = Stops({"b"});
  options.min_tokens = 2;
  EXPECT_EQ(Decode("abab", options, {1}), (Result{"aba", 4, true}));
}

TEST(TextStreamTest,
     AnIncompleteCharacterAtTheEndBecomesAReplacementCharacter) {
  EXPECT_EQ(Decode("a\xE2\x82", Stops({"zz"}), {1}),
            (Result{"a\xEF\xBF\xBD", 3, false}));
}

TEST(TextStreamTest, AStopStringInTheDetokenizersLastTextMatches) {
  EXPECT_EQ(Decode("a\xE2", Stops({"\xEF\xBF\xBD"}), {1}),
            (Result{"a", 2, true}));
}

// A simple reference implementation, which searches the whole text for the
// first position at which a stop string ends.
Result Reference(const std::string& text, const std::vector<std::string>& stops,
                 bool include) {
  for (size_t end = 1; end <= text.size(); ++end) {
    std::string best;
    for (const std::string& stop : stops) {
      if (stop.size() <= end && stop.size() > best.size() &&
          text.compare(end - stop.size(), stop.size(), stop) == 0) {
        best = stop;
      }
    }
    if (!best.empty()) {
      return {text.substr(0, include ? end : end - best.size()), end, true};
    }
  }
  return {text, text.size(), false};
}

TEST(TextStreamTest, TheResultDoesNotDependOnHowTokensAreDividedIntoPushes) {
  std::mt19937 random(7);
  const auto pick = [&random](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  const auto word = [&pick](int low, int high) {
    std::string text;
    const int size = pick(low, high);
    for (int i = 0; i < size; ++i) {
      text.push_back(static_cast<char>('a' + pick(0, 1)));
    }
    return text;
  };
  for (int round = 0; round < 3000; ++round) {
    const std::string text = word(0, 24);
    TextStreamOptions options;
    for (int i = pick(0, 3); i > 0; --i) {
      options.stop_strings.push_back(word(2, 6));
    }
    options.include_stop_string = pick(0, 1) == 1;
    std::vector<size_t> sizes;
    for (int i = 0; i < 8; ++i)
      sizes.push_back(static_cast<size_t>(pick(1, 5)));
    EXPECT_EQ(
        Decode(text, options, sizes),
        Reference(text, options.stop_strings, options.include_stop_string))
        << text;
  }
}

}  // namespace
}  // namespace kvasir::router
