#include "compress/calibrate/token_stream.h"

#include <cstdlib>
#include <optional>

#include "base/status_matchers.h"
#include "base/temp_folder.h"

namespace kvasir::compress {
namespace {

using ::kvasir::base::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(TokenStreamTest, TextsAreCutOnlyBeforeLinesThatDoNotBeginWithWhiteSpace) {
  EXPECT_THAT(CutPoints("", 4), ElementsAre(0));
  EXPECT_THAT(CutPoints("one line without end", 4), ElementsAre(0));
  EXPECT_THAT(CutPoints("aaaa\nbbbb\ncccc\n", 3), ElementsAre(0, 5, 10));
  EXPECT_THAT(CutPoints("aaaa\n bbb\n\ncc\ndd", 3), ElementsAre(0, 11));
}

TEST(TokenStreamTest, EncodingInPiecesEqualsEncodingTheWholeText) {
  const std::string folder =
      std::string(std::getenv("KVASIR_SOURCE_DIR")) + "/models/tiny";
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto tokenizer,
                              model::Tokenizer::Load(folder));
  // Makes a text of 2.5 MB with blank lines, indents and text that looks like a
  // special token.
  std::string text;
  while (text.size() < 2'500'000) {
    text += "It was <|end_of_text|> the best of times;\n\n  indented  \t\n";
    text += std::to_string(text.size()) + " \"quoted\"...\r\n";
  }
  const base::TempFolder temp;
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const TokenStream stream,
      EncodeFile(temp.Write("text", text), *tokenizer, 2));
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const std::vector<int32_t> whole,
      tokenizer->Encode(text,
                        {.add_special_tokens = false, .parse_special = false}));
  EXPECT_GT(CutPoints(text, size_t{1} << 20).size(), 2U);
  EXPECT_EQ(stream.ids, whole);
  EXPECT_EQ(stream.text_bytes, static_cast<int64_t>(text.size()));
  for (const int32_t id : stream.ids) ASSERT_FALSE(tokenizer->IsSpecial(id));
}

TEST(TokenStreamTest, AFolderInPlaceOfATextFileIsRefused) {
  const std::string folder =
      std::string(std::getenv("KVASIR_SOURCE_DIR")) + "/models/tiny";
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto tokenizer,
                              model::Tokenizer::Load(folder));
  EXPECT_THAT(EncodeFile(folder, *tokenizer, 1),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("is not a regular file")));
}

// A token that the tokenizer puts after a text must not be taken for a start
// token.
TEST(TokenStreamTest, TheStartTokenIsTheOneThatTheTokenizerPutsBeforeAText) {
  const auto start = [](const std::string& single) {
    const base::TempFolder folder;
    folder.Write(
        "tokenizer.json",
        absl::StrCat(R"({"model":{"type":"BPE","vocab":{"a":0,"<s>":1,"</s>":2},
               "merges":[]},"added_tokens":[
               {"id":1,"content":"<s>","special":true},
               {"id":2,"content":"</s>","special":true}],
               "pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false},
               "decoder":{"type":"ByteLevel"},
               "post_processor":{"type":"TemplateProcessing","single":[)",
                     single, R"(],"pair":[],"special_tokens":{
               "<s>":{"id":"<s>","ids":[1],"tokens":["<s>"]},
               "</s>":{"id":"</s>","ids":[2],"tokens":["</s>"]}}}})"));
    const auto tokenizer = model::Tokenizer::Load(folder.path());
    EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
    return tokenizer.ok()
               ? StartToken(**tokenizer)
               : absl::StatusOr<std::optional<int32_t>>(tokenizer.status());
  };
  const std::string text = R"({"Sequence":{"id":"A","type_id":0}})";
  const std::string first = R"({"SpecialToken":{"id":"<s>","type_id":0}})";
  const std::string last = R"({"SpecialToken":{"id":"</s>","type_id":0}})";
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto both,
                              start(first + "," + text + "," + last));
  EXPECT_EQ(both, std::optional<int32_t>(1));
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto behind, start(text + "," + last));
  EXPECT_EQ(behind, std::nullopt);
}

TEST(TokenStreamTest, AMissingTextFileGivesANotFoundError) {
  const std::string folder =
      std::string(std::getenv("KVASIR_SOURCE_DIR")) + "/models/tiny";
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto tokenizer,
                              model::Tokenizer::Load(folder));
  EXPECT_THAT(
      EncodeFile("/nonexistent/text", *tokenizer, 1),
      StatusIs(absl::StatusCode::kNotFound, HasSubstr("/nonexistent/text")));
}

}  // namespace
}  // namespace kvasir::compress
