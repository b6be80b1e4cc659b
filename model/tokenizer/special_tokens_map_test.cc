#include "model/tokenizer/special_tokens_map.h"

#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "base/temp_folder.h"
#include "model/tokenizer/tokenizer.h"

namespace kvasir::model {
namespace {

using base::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

// The tokens "a" 0, "</s>" 4, "<|endoftext|>" 5 and "<E>" 6.
constexpr char kTokenizer[] =
    R"({"added_tokens":[{"id":4,"content":"</s>","special":true},
        {"id":5,"content":"<|endoftext|>","special":true},
        {"id":6,"content":"<E>","special":true}],
        "model":{"type":"BPE","vocab":{"a":0},"merges":[]}})";

struct EosCase {
  const char* config;
  const char* map;  // an empty text: no such file
  std::vector<int32_t> eos;
};

// The expected ids are those of AutoTokenizer in transformers 4.57 and 5.24.
TEST(SpecialTokensMapTest, TheEosTokenIsReadFromEachPlaceThatMayNameIt) {
  for (const EosCase& one : std::vector<EosCase>{
           {"", "", {}},
           {"{}", "", {}},
           {R"({"eos_token":"<E>"})", "", {6}},
           {R"({"eos_token":{"content":"<E>"}})", "", {6}},
           {"", R"({"eos_token":"<E>"})", {6}},
           {"{}", R"({"eos_token":{"content":"<E>"}})", {6}},
           {R"({"eos_token":"</s>"})", R"({"eos_token":"<E>"})", {6}},
           {R"({"eos_token":"</s>"})", R"({"pad_token":"<E>"})", {4}},
           {R"({"eos_token":null})", R"({"eos_token":"<E>"})", {6}},
           {R"({"added_tokens_decoder":{}})", R"({"eos_token":"<E>"})", {}},
           {R"({"eos_token":"</s>","added_tokens_decoder":{}})",
            R"({"eos_token":"<E>"})",
            {4}},
           {R"({"tokenizer_class":"LlamaTokenizer"})", "", {4}},
           {R"({"tokenizer_class":"LlamaTokenizerFast"})", "", {4}},
           {R"({"tokenizer_class":"LlamaTokenizer","eos_token":null})", "", {}},
           {R"({"tokenizer_class":"LlamaTokenizer"})",
            R"({"eos_token":"<E>"})",
            {6}},
           {R"({"tokenizer_class":"GPT2Tokenizer"})", "", {5}},
           {R"({"tokenizer_class":"Qwen2TokenizerFast"})", "", {5}},
           {R"({"tokenizer_class":"GPTNeoXTokenizerFast"})", "", {5}},
           {R"({"tokenizer_class":"CodeGenTokenizer"})", "", {5}},
           {R"({"tokenizer_class":"PreTrainedTokenizerFast"})", "", {}},
           // No token of the vocabulary.
           {R"({"tokenizer_class":"CohereTokenizer"})", "", {}}}) {
    const base::TempFolder folder;
    folder.Write("tokenizer.json", kTokenizer);
    if (*one.config != '\0') folder.Write("tokenizer_config.json", one.config);
    if (*one.map != '\0') folder.Write("special_tokens_map.json", one.map);
    const auto tokenizer = Tokenizer::Load(folder.path());
    KVASIR_ASSERT_OK(tokenizer);
    EXPECT_EQ((*tokenizer)->eos_ids(), one.eos) << one.config << one.map;
  }
}

TEST(SpecialTokensMapTest, AWrongMapIsRefusedByName) {
  for (const char* map : {"[]", "{", R"({"eos_token":7})"}) {
    const base::TempFolder folder;
    folder.Write("tokenizer.json", kTokenizer);
    folder.Write("special_tokens_map.json", map);
    EXPECT_THAT(Tokenizer::Load(folder.path()),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr(folder.path()), HasSubstr("_"))))
        << map;
  }
  EXPECT_THAT(MergeSpecialTokensMap("{}", "[]", "x"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("x/special_tokens_map.json is an array")));
}

}  // namespace
}  // namespace kvasir::model
