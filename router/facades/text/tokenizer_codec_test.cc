#include "router/facades/text/tokenizer_codec.h"

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "router/facades/text/text_stream.h"

namespace kvasir::router {
namespace {

using ::testing::IsEmpty;

std::shared_ptr<const model::Tokenizer> Load(const std::string& name) {
  auto tokenizer =
      model::Tokenizer::Load(std::string(std::getenv("KVASIR_SOURCE_DIR")) +
                             "/tests/golden/tokenizers/" + name);
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}

class TokenizerCodecTest : public ::testing::TestWithParam<const char*> {};

// The prompt's text plus the streamed text must equal the text of all tokens
// decoded together.
TEST_P(TokenizerCodecTest, TheStreamedTextContinuesTheDecodedPromptExactly) {
  const auto tokenizer = Load(GetParam());
  const TokenizerCodec codec(tokenizer);
  const std::string prompt = "The quick brown";
  KVASIR_ASSERT_OK_AND_ASSIGN(const std::vector<int32_t> prompt_ids,
                              codec.EncodePrompt(prompt, 1000));
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const std::vector<int32_t> ids,
      codec.EncodeWord(" fox jumps \xE2\x80\x94 na\xC3\xAFve"));
  TextStreamOptions options;
  options.stop_strings = {"never there"};
  TextStream stream(codec.NewDetokenizer(prompt_ids, true), options);
  std::string text;
  for (const int32_t id : ids) text += stream.Push({&id, 1}).text;
  text += stream.Finish();
  std::vector<int32_t> all = prompt_ids;
  all.insert(all.end(), ids.begin(), ids.end());
  EXPECT_EQ(tokenizer->Decode(prompt_ids, true) + text,
            tokenizer->Decode(all, true));
}

INSTANTIATE_TEST_SUITE_P(Tokenizers, TokenizerCodecTest,
                         ::testing::Values("gpt2", "llama2", "llama3",
                                           "mistral"),
                         [](const auto& test) {
                           return std::string(test.param);
                         });

TEST(TokenizerCodecNamesTest, TheNameOfASpecialTokenIsEncodedAsThatOneToken) {
  const auto tokenizer = Load("llama2");
  const TokenizerCodec codec(tokenizer);
  KVASIR_ASSERT_OK_AND_ASSIGN(const std::vector<int32_t> ids,
                              codec.EncodeWord("</s>"));
  ASSERT_EQ(ids.size(), 1u);
  EXPECT_TRUE(codec.IsSpecial(ids[0]));
  EXPECT_THAT(codec.TokenText(-1), IsEmpty());
}

}  // namespace
}  // namespace kvasir::router
