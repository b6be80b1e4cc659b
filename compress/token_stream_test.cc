#include "compress/token_stream.h"

#include <cstdlib>
#include <fstream>

#include "base/status_matchers.h"

namespace kvasir::compress {
namespace {

using ::kvasir::base::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(TokenStreamTest, CutsOnlyBeforeLinesThatBeginWithText) {
  EXPECT_THAT(CutPoints("", 4), ElementsAre(0));
  EXPECT_THAT(CutPoints("one line without end", 4), ElementsAre(0));
  EXPECT_THAT(CutPoints("aaaa\nbbbb\ncccc\n", 3), ElementsAre(0, 5, 10));
  EXPECT_THAT(CutPoints("aaaa\n bbb\n\ncc\ndd", 3), ElementsAre(0, 11));
}

TEST(TokenStreamTest, PiecesEncodeAsTheWholeDoes) {
  const std::string folder =
      std::string(std::getenv("KVASIR_SOURCE_DIR")) + "/models/tiny";
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto tokenizer,
                              model::Tokenizer::Load(folder));
  // 2.5 MB with blank lines, indents and text that looks like a special token.
  std::string text;
  while (text.size() < 2'500'000) {
    text += "It was <|end_of_text|> the best of times;\n\n  indented  \t\n";
    text += std::to_string(text.size()) + " \"quoted\"...\r\n";
  }
  const std::string path = testing::TempDir() + "/kvasir_token_stream.txt";
  std::ofstream(path, std::ios::binary) << text;
  KVASIR_ASSERT_OK_AND_ASSIGN(const TokenStream stream,
                              EncodeFile(path, *tokenizer, 2));
  std::remove(path.c_str());
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const std::vector<int32_t> whole,
      tokenizer->Encode(text,
                        {.add_special_tokens = false, .parse_special = false}));
  EXPECT_GT(CutPoints(text, size_t{1} << 20).size(), 2U);
  EXPECT_EQ(stream.ids, whole);
  EXPECT_EQ(stream.text_bytes, static_cast<int64_t>(text.size()));
  for (const int32_t id : stream.ids) ASSERT_FALSE(tokenizer->IsSpecial(id));
}

TEST(TokenStreamTest, MissingFilesAreNotFound) {
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
