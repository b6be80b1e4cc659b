#include "worker/load/end_tokens.h"

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"

namespace kvasir::cli {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// A vocabulary of the tokens "a" 0, "b" 1 and "</s>" 2.
std::unique_ptr<model::Tokenizer> TokenizerWith(const std::string& config) {
  auto tokenizer = model::Tokenizer::FromJson(
      R"({"added_tokens":[{"id":2,"content":"</s>","special":true}],
          "model":{"type":"BPE","vocab":{"a":0,"b":1},"merges":[]}})",
      config);
  KVASIR_EXPECT_OK(tokenizer);
  return tokenizer.ok() ? *std::move(tokenizer) : nullptr;
}

model::DecoderSpec SpecWith(std::vector<int32_t> eos) {
  model::DecoderSpec spec;
  spec.vocab_size = 10;
  spec.eos_token_ids = std::move(eos);
  spec.eos_source = "x/generation_config.json";
  return spec;
}

struct Chosen {
  std::vector<int32_t> ids;
  std::string log;
};

Chosen Choose(const model::DecoderSpec& spec,
              const model::Tokenizer* tokenizer) {
  ::testing::internal::CaptureStderr();
  Chosen chosen;
  chosen.ids = ChooseEndTokens(spec, tokenizer);
  chosen.log = ::testing::internal::GetCapturedStderr();
  return chosen;
}

TEST(EndTokensTest, TheTokenizersEosAlsoEndsAnOutput) {
  for (const char* eos : {R"("</s>")", R"({"content":"</s>"})"}) {
    const auto tokenizer =
        TokenizerWith(absl::StrCat("{\"eos_token\":", eos, "}"));
    const Chosen both = Choose(SpecWith({7, 1}), tokenizer.get());
    EXPECT_THAT(both.ids, ElementsAre(7, 1, 2));
    EXPECT_THAT(both.log, AllOf(HasSubstr("7, 1, 2"),
                                HasSubstr("7, 1 (x/generation_config.json)")));
    EXPECT_THAT(Choose(SpecWith({2}), tokenizer.get()).ids, ElementsAre(2));
    EXPECT_THAT(Choose(SpecWith({}), tokenizer.get()).ids, ElementsAre(2));
  }
}

TEST(EndTokensTest, AModelWithoutEndTokensIsServedWithAWarning) {
  const auto tokenizer = TokenizerWith("{}");
  for (const model::Tokenizer* one :
       {static_cast<const model::Tokenizer*>(nullptr),
        static_cast<const model::Tokenizer*>(tokenizer.get())}) {
    const Chosen none = Choose(SpecWith({}), one);
    EXPECT_THAT(none.ids, IsEmpty());
    EXPECT_THAT(none.log, AllOf(HasSubstr(" W "), HasSubstr("no end token"),
                                HasSubstr("none (x/generation_config.json)")));
    EXPECT_THAT(Choose(SpecWith({3}), one).ids, ElementsAre(3));
  }
}

TEST(EndTokensTest, AnEosBeyondTheModelsVocabularyIsIgnoredWithAWarning) {
  const auto tokenizer = TokenizerWith(R"({"eos_token":"</s>"})");
  model::DecoderSpec spec = SpecWith({0});
  spec.vocab_size = 2;
  const Chosen chosen = Choose(spec, tokenizer.get());
  EXPECT_THAT(chosen.ids, ElementsAre(0));
  EXPECT_THAT(chosen.log, AllOf(HasSubstr("beyond the model's vocabulary"),
                                HasSubstr("id=2"), HasSubstr("vocab_size=2")));
}

}  // namespace
}  // namespace kvasir::cli
