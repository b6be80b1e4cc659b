#include "model/tokenizer/detokenizer.h"

#include <cstdlib>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "gtest/gtest.h"
#include "model/tokenizer/utf8.h"

namespace kvasir::model {
namespace {

using Ids = std::vector<int32_t>;

std::unique_ptr<Tokenizer> Golden(const std::string& name) {
  const char* dir = std::getenv("KVASIR_SOURCE_DIR");
  auto tokenizer = Tokenizer::Load(std::string(dir ? dir : ".") +
                                   "/tests/golden/tokenizers/" + name);
  KVASIR_EXPECT_OK(tokenizer);
  return *std::move(tokenizer);
}

Ids RandomIds(const Tokenizer& tokenizer, std::mt19937& random) {
  Ids ids;
  const size_t count = random() % 40;
  const auto range = static_cast<uint32_t>(tokenizer.vocab_size()) + 8;
  for (size_t i = 0; i < count; ++i) {
    // Half of the ids come from the front of the vocabulary, which has the byte
    // tokens, so that runs of bytes sometimes form characters.
    const uint32_t bound = random() % 2 == 0 ? range : 259;
    ids.push_back(static_cast<int32_t>(random() % bound) - 4);
  }
  return ids;
}

class DetokenizerTest : public testing::TestWithParam<const char*> {};

TEST_P(DetokenizerTest,
       PiecesOfStreamedTextAreValidUtf8AndAddUpToTheWholeText) {
  const auto tokenizer = Golden(GetParam());
  std::mt19937 random(3);
  for (int round = 0; round < 3000; ++round) {
    const Ids ids = RandomIds(*tokenizer, random);
    const bool skip_special = round % 2 == 0;
    IncrementalDetokenizer stream(*tokenizer, skip_special);
    std::string text;
    for (const int32_t id : ids) {
      const std::string delta = stream.Push(id);
      ASSERT_TRUE(IsValidUtf8(delta)) << testing::PrintToString(ids);
      ASSERT_LE(stream.pending_bytes(), 3u);
      text += delta;
    }
    const std::string rest = stream.Finish();
    ASSERT_TRUE(IsValidUtf8(rest));
    ASSERT_EQ(text + rest, tokenizer->Decode(ids, skip_special))
        << testing::PrintToString(ids);
  }
}

TEST_P(DetokenizerTest, AStreamThatIsPrimedWithAPromptContinuesThePromptsText) {
  const auto tokenizer = Golden(GetParam());
  const std::string text =
      "The miller's river 12 \xE6\xB2\xB3\xE6\xB0\xB4 \xF0\x9F\x99\x82 boats";
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const Ids ids, tokenizer->Encode(text, {.add_special_tokens = false}));
  const std::string whole = tokenizer->Decode(ids, true);
  for (size_t cut = 1; cut < ids.size(); ++cut) {
    const std::span<const int32_t> all(ids);
    IncrementalDetokenizer before(*tokenizer, true);
    std::string first;
    for (const int32_t id : all.first(cut)) first += before.Push(id);
    IncrementalDetokenizer after(*tokenizer, true);
    after.Prime(all.first(cut));
    std::string second;
    for (const int32_t id : all.subspan(cut)) second += after.Push(id);
    ASSERT_EQ(first + second + after.Finish(), whole) << cut;
  }
}

INSTANTIATE_TEST_SUITE_P(All, DetokenizerTest,
                         testing::Values("gpt2", "llama3", "llama2", "mistral",
                                         "metaspace-decoder"),
                         [](const auto& param_info) {
                           std::string name = param_info.param;
                           for (char& c : name) c = c == '-' ? '_' : c;
                           return name;
                         });

TEST(DetokenizerTest, BytesOfAnIncompleteCharacterAreHeldBack) {
  const auto tokenizer = Golden("llama2");
  const auto byte = [&](const char* token) {
    return *tokenizer->TokenToId(token);
  };
  IncrementalDetokenizer stream(*tokenizer, true);
  EXPECT_EQ(stream.Push(byte("<0xF0>")), "");
  EXPECT_EQ(stream.Push(byte("<0x9F>")), "");
  EXPECT_EQ(stream.Push(byte("<0x99>")), "");
  EXPECT_EQ(stream.pending_bytes(), 3u);
  EXPECT_EQ(stream.Push(byte("<0x82>")), "\xF0\x9F\x99\x82");
  // If a plain token comes before a character is complete, each byte so far
  // becomes U+FFFD.
  EXPECT_EQ(stream.Push(byte("<0xE6>")), "");
  EXPECT_EQ(stream.Push(*tokenizer->TokenToId("e")),
            "\xEF\xBF\xBD"
            "e");
  EXPECT_EQ(stream.Push(byte("<0xE6>")), "");
  EXPECT_EQ(stream.Finish(), "\xEF\xBF\xBD");
}

TEST(DetokenizerTest, TheFirstWordAfterAPromptKeepsItsLeadingSpace) {
  const auto tokenizer = Golden("llama2");
  const int32_t word = *tokenizer->TokenToId("\xE2\x96\x81the");
  IncrementalDetokenizer fresh(*tokenizer, true);
  EXPECT_EQ(fresh.Push(word), "the");
  IncrementalDetokenizer primed(*tokenizer, true);
  primed.Prime(Ids{word});
  EXPECT_EQ(primed.Push(word), " the");
}

TEST(DetokenizerTest, OnlyCharactersThatTheTrailingStripMayRemoveAreHeldBack) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto tokenizer, Tokenizer::FromJson(R"({
    "decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"},
      {"type": "Strip", "content": "_", "start": 1, "stop": 2}]},
    "model": {"vocab": {"_": 0, "a": 1, "__": 2}, "merges": [["_", "_"]]}})"));
  IncrementalDetokenizer stream(*tokenizer, true);
  // The first "_" is stripped; the second one is held back, because it may be
  // the end of the text.
  EXPECT_EQ(stream.Push(2), "");
  EXPECT_EQ(stream.Push(1), "_a");
  EXPECT_EQ(stream.Push(2), "");
  EXPECT_EQ(stream.Push(0), "_");
  EXPECT_EQ(stream.Finish(), "");
  EXPECT_EQ(tokenizer->Decode(Ids{2, 1, 2, 0}, true), "_a_");
}

}  // namespace
}  // namespace kvasir::model
