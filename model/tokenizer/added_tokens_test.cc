// Tests overlapping matches of added tokens. The expected ids are those of
// Hugging Face's tokenizers 0.22.2.
#include "model/tokenizer/added_tokens.h"

#include <string>
#include <utility>
#include <vector>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "model/tokenizer/tokenizer.h"
#include "model/tokenizer/utf8.h"
#include "nlohmann/json.hpp"

namespace kvasir::model {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using Ids = std::vector<int32_t>;

// A token and its flags: w for single_word, l for lstrip, r for rstrip, n for
// normalized, s for special.
using Flagged = std::pair<std::string, std::string>;

// Byte b has the id b, and the added tokens have the ids from 256.
json FileWith(const std::vector<Flagged>& tokens) {
  json file = json::parse(R"({"pre_tokenizer": {
    "type": "ByteLevel", "add_prefix_space": false, "use_regex": false},
    "decoder": {"type": "ByteLevel"}, "model": {"type": "BPE", "merges": []}})");
  for (int b = 0; b < 256; ++b) {
    std::string letter;
    AppendByteLevel(std::string(1, static_cast<char>(b)), &letter);
    file["model"]["vocab"][letter] = b;
  }
  for (const auto& [content, flags] : tokens) {
    const auto has = [&flags = flags](char flag) {
      return flags.find(flag) != std::string::npos;
    };
    file["added_tokens"].push_back({{"id", 256 + file["added_tokens"].size()},
                                    {"content", content},
                                    {"single_word", has('w')},
                                    {"lstrip", has('l')},
                                    {"rstrip", has('r')},
                                    {"normalized", has('n')},
                                    {"special", has('s')}});
  }
  return file;
}

struct Case {
  std::vector<Flagged> tokens;
  bool lower;  // true: the file has a normalizer to lower case
  std::string text;
  Ids ids;
  Ids ids_without_special;  // if special tokens are read as text
};

TEST(AddedTokensTest, OverlappingAddedTokensGiveTheIdsOfTheReference) {
  const std::vector<Case> cases = {
      {{{"<R>", "r"}, {"\n", ""}},
       false,
       "<R>\na",
       {256, 257, 97},
       {256, 257, 97}},
      {{{"<R>", "r"}, {"\n", ""}},
       false,
       "<R>  \n  a",
       {256, 257, 32, 32, 97},
       {256, 257, 32, 32, 97}},
      {{{"<R>", "r"}, {"\n", "r"}},
       false,
       "<R> \n \n a",
       {256, 257, 257, 97},
       {256, 257, 257, 97}},
      {{{"<R>", "r"}, {"\n", "lr"}},
       false,
       "<R> \n \n a",
       {256, 97},
       {256, 97}},
      {{{"<R>", "r"}, {"\n", "w"}},
       false,
       "<R> \na <R>\n.",
       {256, 97, 32, 256, 257, 46},
       {256, 97, 32, 256, 257, 46}},
      {{{"<R>", "rs"}, {"\n", "s"}},
       false,
       "<R>\na",
       {256, 257, 97},
       {60, 82, 62, 10, 97}},
      {{{"<R>", "rs"}, {"\n", ""}},
       false,
       "<R> \na",
       {256, 257, 97},
       {60, 82, 62, 32, 257, 97}},
      {{{"<R>", "r"}, {"<L>", "l"}}, false, "<R>  <L>", {256, 257}, {256, 257}},
      {{{"<R>", "r"}, {"<L>", "l"}, {" ", ""}},
       false,
       "<R>  <L>",
       {256, 258, 258, 257},
       {256, 258, 258, 257}},
      {{{"<R>", "r"}, {"  ", ""}, {" ", ""}},
       false,
       "<R>   a",
       {256, 257, 258, 97},
       {256, 257, 258, 97}},
      {{{"  ", "lr"}, {"\n", ""}},
       false,
       "a   \n \n b",
       {97, 256, 257, 32, 257, 32, 98},
       {97, 256, 257, 32, 257, 32, 98}},
      {{{"<R>", "r"}, {"<R>\n", ""}},
       false,
       "<R>\n<R> \n",
       {257, 256},
       {257, 256}},
      {{{"<R>", "r"}, {"\n<L>", "l"}},
       false,
       "<R> \n<L>",
       {256, 257},
       {256, 257}},
      {{{"ab", "w"}, {"a ", ""}},
       false,
       "ab a b",
       {256, 32, 257, 98},
       {256, 32, 257, 98}},
      {{{"<R", "r"}, {"R>", "l"}},
       false,
       "<R> R> > a",
       {256, 62, 257, 32, 62, 32, 97},
       {256, 62, 257, 32, 62, 32, 97}},
      {{{"<R>", "rn"}, {"\n", "n"}},
       false,
       "<R>\na",
       {256, 257, 97},
       {256, 257, 97}},
      {{{"<R>", "r"}, {"\n", "n"}},
       false,
       "<R>\na\n",
       {256, 97, 257},
       {256, 97, 257}},
      {{{"<R>", "rn"}, {"\n", ""}},
       false,
       "<R>\na",
       {256, 257, 97},
       {256, 257, 97}},
      {{{"Ab", "n"}, {"aB", "ns"}},
       true,
       "xab AB",
       {120, 257, 32, 257},
       {120, 97, 98, 32, 97, 98}},
      {{{"Ab", "n"}, {"aB", "n"}},
       true,
       "xab AB",
       {120, 256, 32, 256},
       {120, 256, 32, 256}},
      {{{"Ab", ""}, {"aB", "n"}},
       true,
       "Ab aB ab",
       {256, 32, 257, 32, 257},
       {256, 32, 257, 32, 257}},
      {{{"\xE3\x80\x80", "r"}, {"\n", ""}},
       false,
       "\xE3\x80\x80 \na",
       {256, 257, 97},
       {256, 257, 97}},
  };
  for (const Case& c : cases) {
    json file = FileWith(c.tokens);
    if (c.lower) file["normalizer"] = {{"type", "Lowercase"}};
    SCOPED_TRACE(testing::PrintToString(c.text) + file["added_tokens"].dump());
    KVASIR_ASSERT_OK_AND_ASSIGN(const auto tokenizer,
                                Tokenizer::FromJson(file.dump()));
    KVASIR_ASSERT_OK_AND_ASSIGN(const Ids ids, tokenizer->Encode(c.text));
    EXPECT_EQ(ids, c.ids);
    KVASIR_ASSERT_OK_AND_ASSIGN(
        const Ids plain, tokenizer->Encode(c.text, {.parse_special = false}));
    EXPECT_EQ(plain, c.ids_without_special);
  }
}

// For this text, the reference stops with the error "AddedVocabulary
// bad split".
TEST(AddedTokensTest,
     ATokenInsideWhitespaceThatThePreviousTokenStrippedGivesNoId) {
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const auto tokenizer,
      Tokenizer::FromJson(FileWith({{"<R>", "r"}, {"\n", "l"}}).dump()));
  KVASIR_ASSERT_OK_AND_ASSIGN(const Ids ids, tokenizer->Encode("<R> \n a"));
  EXPECT_EQ(ids, (Ids{256, ' ', 'a'}));
}

TEST(AddedTokensTest, ATokenThatTheNormalizerMakesEmptyIsRefused) {
  json file = FileWith({{"<R>", "r"}, {"  ", "ln"}});
  file["normalizer"] = {
      {"type", "Strip"}, {"strip_left", true}, {"strip_right", true}};
  EXPECT_THAT(Tokenizer::FromJson(file.dump()),
              base::StatusIs(absl::StatusCode::kUnimplemented,
                             HasSubstr("added_tokens[1] has the id 257")));
  file["added_tokens"][1]["lstrip"] = false;
  EXPECT_THAT(Tokenizer::FromJson(file.dump()),
              base::StatusIs(absl::StatusCode::kUnimplemented,
                             HasSubstr("becomes empty in the normalizer")));
  file["added_tokens"][1]["normalized"] = false;
  KVASIR_EXPECT_OK(Tokenizer::FromJson(file.dump()));
}

}  // namespace
}  // namespace kvasir::model
