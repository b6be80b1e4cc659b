#include "model/tokenizer/gguf_tokenizer.h"

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "base/temp_folder.h"
#include "model/gguf/testing/gguf_builder.h"
#include "model/tokenizer/tokenizer.h"
#include "nlohmann/json.hpp"

namespace kvasir::model {
namespace {

using base::StatusIs;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Ids = std::vector<int32_t>;

json Golden(const std::string& name, const std::string& file) {
  const char* source = std::getenv("KVASIR_SOURCE_DIR");
  std::ifstream in(absl::StrCat(source == nullptr ? "." : source,
                                "/tests/golden/tokenizers/", name, "/", file));
  return json::parse(std::string(std::istreambuf_iterator<char>(in),
                                 std::istreambuf_iterator<char>()));
}

// Returns GGUF metadata for the tokenizer of a golden tokenizer.json.
GgufBuilder BuilderOf(const json& file) {
  std::vector<std::string> tokens;
  std::vector<int32_t> types;
  const auto put = [&](const std::string& token, size_t id, int32_t type) {
    if (id >= tokens.size()) {
      tokens.resize(id + 1);
      types.resize(id + 1, 5);
    }
    tokens[id] = token;
    types[id] = type;
  };
  const bool is_sentence_piece = file["model"]["byte_fallback"].get<bool>();
  for (const auto& [token, id] : file["model"]["vocab"].items()) {
    const bool is_byte =
        is_sentence_piece && token.size() == 6 && token.starts_with("<0x");
    put(token, id.get<size_t>(), is_byte ? 6 : 1);
  }
  std::set<std::string> added;
  for (const json& token : file["added_tokens"]) {
    const auto content = token["content"].get<std::string>();
    added.insert(content);
    put(content, token["id"].get<size_t>(),
        content == "<unk>"             ? 2
        : token["special"].get<bool>() ? 3
                                       : 4);
  }
  std::vector<std::string> merges;
  std::map<std::string, float> scores;
  for (const json& merge : file["model"]["merges"]) {
    const std::string text =
        merge.is_string() ? merge.get<std::string>()
                          : absl::StrCat(merge[0].get<std::string>(), " ",
                                         merge[1].get<std::string>());
    std::string merged = text;
    merged.erase(merged.find(' ', 1), 1);
    // added tokens are found before merges
    if (added.contains(merged)) continue;
    scores.emplace(merged, -static_cast<float>(merges.size()));
    merges.push_back(text);
  }
  std::vector<float> all_scores;
  for (const std::string& token : tokens) {
    const auto found = scores.find(token);
    all_scores.push_back(found == scores.end() ? -1e6f : found->second);
  }
  GgufBuilder builder;
  builder.Strings("tokenizer.ggml.tokens", tokens)
      .I32s("tokenizer.ggml.token_type", types)
      .String("tokenizer.ggml.model", is_sentence_piece ? "llama" : "gpt2");
  if (is_sentence_piece) {
    builder.F32s("tokenizer.ggml.scores", all_scores);
  } else {
    builder.Strings("tokenizer.ggml.merges", merges);
  }
  return builder;
}

absl::StatusOr<std::unique_ptr<Tokenizer>> Load(const GgufBuilder& builder) {
  const base::TempFolder folder;
  return Tokenizer::Load(folder.Write("x.gguf", builder.Build()));
}

// True if the case's text has an added token with flags, which GGUF files
// cannot express.
bool NeedsFlags(const json& file, const std::string& text) {
  for (const json& added : file["added_tokens"]) {
    const bool plain =
        !added["lstrip"].get<bool>() && !added["rstrip"].get<bool>() &&
        !added["single_word"].get<bool>() && !added["normalized"].get<bool>();
    if (!plain && text.find(added["content"].get<std::string>()) != text.npos) {
      return true;
    }
  }
  return false;
}

struct GoldenCase {
  std::string name;
  std::string split;
  int32_t bos = -1;
};

class GgufGoldenTokenizerTest : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(GgufGoldenTokenizerTest, TokenIdsAndTextsEqualThoseOfTheReference) {
  const json file = Golden(GetParam().name, "tokenizer.json");
  GgufBuilder builder = BuilderOf(file);
  if (!GetParam().split.empty()) {
    builder.String("tokenizer.ggml.pre", GetParam().split);
  }
  if (GetParam().bos >= 0) {
    builder.U32("tokenizer.ggml.bos_token_id",
                static_cast<uint32_t>(GetParam().bos));
  }
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto tokenizer, Load(builder));
  const json cases = Golden(GetParam().name, "cases.json");
  int compared = 0;
  for (const json& entry : cases["encode"]) {
    const std::string text = entry["text"];
    if (NeedsFlags(file, text)) continue;
    ++compared;
    const Ids ids = entry["ids"];
    const Ids bare = entry.value("ids_no_special", ids);
    const Ids plain = entry.value("ids_plain", bare);
    EXPECT_EQ(tokenizer->Encode(text).value(), ids) << entry.dump();
    EXPECT_EQ(tokenizer->Encode(text, {.add_special_tokens = false}).value(),
              bare)
        << entry.dump();
    EXPECT_EQ(tokenizer
                  ->Encode(text, {.add_special_tokens = false,
                                  .parse_special = false})
                  .value(),
              plain)
        << entry.dump();
    EXPECT_EQ(tokenizer->Decode(ids, false), entry.value("decoded", text))
        << entry.dump();
  }
  EXPECT_GE(compared, 50);
  for (const json& entry : cases["decode"]) {
    const Ids ids = entry["ids"];
    EXPECT_EQ(tokenizer->Decode(ids, false), entry["decoded"]) << entry.dump();
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, GgufGoldenTokenizerTest,
    ::testing::Values(GoldenCase{"gpt2", "gpt-2"},
                      GoldenCase{"llama3", "llama-bpe", 501},
                      GoldenCase{"qwen2", "qwen2"}, GoldenCase{"llama2", ""}),
    [](const auto& param) { return param.param.name; });

// A tokenizer of tests/golden/tokenizers/nasty, and its value
// of tokenizer.ggml.pre.
struct NastyType {
  std::string name;
  std::string split;
};

class GgufNastyTest : public ::testing::TestWithParam<NastyType> {};

TEST_P(GgufNastyTest, TokenIdsAndTextsEqualThoseOfTheReference) {
  const json texts = Golden("nasty", "texts.json");
  json row;
  for (const json& each : Golden("nasty", "cases.json")) {
    if (each["name"] == GetParam().name && each.contains("base")) row = each;
  }
  const json file =
      Golden("nasty", absl::StrCat(row["base"].get<std::string>(), ".json"));
  GgufBuilder builder = BuilderOf(file);
  if (!GetParam().split.empty()) {
    builder.String("tokenizer.ggml.pre", GetParam().split);
  } else if (GetParam().name == "gemma") {
    builder.Bool("tokenizer.ggml.add_space_prefix", false);
  }
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto tokenizer, Load(builder));
  int compared = 0;
  for (size_t i = 0; i < texts.size(); ++i) {
    const std::string text = texts[i];
    // Some merges of these vocabularies give a byte token. GGUF files have no
    // such merges.
    if (NeedsFlags(file, text) || text.find("<0x") != text.npos) continue;
    ++compared;
    const Ids ids = row["ids"][i];
    EXPECT_EQ(tokenizer->Encode(text, {.add_special_tokens = false}).value(),
              ids)
        << texts[i].dump();
    const json decoded = row["decoded"].value(std::to_string(i), texts[i]);
    if (decoded.is_null()) continue;
    EXPECT_EQ(tokenizer->Decode(ids, false), decoded);
  }
  EXPECT_GE(compared, 70);
}

INSTANTIATE_TEST_SUITE_P(All, GgufNastyTest,
                         ::testing::Values(NastyType{"gpt2", "gpt-2"},
                                           NastyType{"llama3", "smaug-bpe"},
                                           NastyType{"qwen2", "qwen2"},
                                           NastyType{"smollm", "smollm"},
                                           NastyType{"o200k", "gpt-4o"},
                                           NastyType{"tekken", "tekken"},
                                           NastyType{"llama2", ""},
                                           NastyType{"gemma", ""}),
                         [](const auto& param) { return param.param.name; });

// A byte-level tokenizer of the letters a to c, their merge "ab", and a
// control token.
GgufBuilder Small() {
  GgufBuilder builder;
  builder.String("tokenizer.ggml.model", "gpt2")
      .Strings("tokenizer.ggml.tokens", {"a", "b", "c", "ab", "<s>", "<|x|>"})
      .I32s("tokenizer.ggml.token_type", {1, 1, 1, 1, 3, 4})
      .Strings("tokenizer.ggml.merges", {"a b"})
      .U32("tokenizer.ggml.bos_token_id", 4)
      .U32("tokenizer.ggml.eos_token_id", 4);
  return builder;
}

TEST(GgufTokenizerTest, ReadsControlTokensBosEosAndTheChatTemplate) {
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const auto tokenizer,
      Load(Small()
               .String("tokenizer.ggml.pre", "gpt-2")
               .Bool("tokenizer.ggml.add_bos_token", true)
               .Bool("tokenizer.ggml.add_eos_token", true)
               .String("tokenizer.chat_template", "{{ \"hi\\n\" }}")));
  EXPECT_EQ(tokenizer->Encode("abc").value(), Ids({4, 3, 2, 4}));
  EXPECT_EQ(tokenizer->bos_id(), 4);
  EXPECT_THAT(tokenizer->eos_ids(), ElementsAre(4));
  EXPECT_TRUE(tokenizer->IsSpecial(4));
  EXPECT_FALSE(tokenizer->IsSpecial(5));
  EXPECT_EQ(tokenizer->chat_template(), "{{ \"hi\\n\" }}");
  EXPECT_EQ(tokenizer->Encode("a<|x|>b", {.add_special_tokens = false}).value(),
            Ids({0, 5, 1}));
}

TEST(GgufTokenizerTest, BosIsAddedOnlyIfTheFileOrItsPreTokenizerRequiresIt) {
  for (const auto& [split, ids] :
       {std::pair("qwen2", Ids({3})), std::pair("llama-bpe", Ids({4, 3})),
        std::pair("tekken", Ids({4, 3})), std::pair("default", Ids({3}))}) {
    KVASIR_ASSERT_OK_AND_ASSIGN(
        const auto tokenizer,
        Load(Small().String("tokenizer.ggml.pre", split)));
    EXPECT_EQ(tokenizer->Encode("ab").value(), ids) << split;
  }
}

TEST(GgufTokenizerTest,
     AFileWithoutAPreTokenizerNameIsSplitByTheDefaultPattern) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto tokenizer, Load(Small()));
  EXPECT_EQ(tokenizer->Encode("ab").value(), Ids({3}));
}

TEST(GgufTokenizerTest, AControlTokenIsNeverAPartOfAText) {
  // Before any merge, the whole text is searched in the vocabulary, which does
  // not contain control tokens.
  GgufBuilder builder;
  builder.String("tokenizer.ggml.model", "gpt2")
      .Strings("tokenizer.ggml.tokens", {"a", "b", "ab"})
      .I32s("tokenizer.ggml.token_type", {1, 1, 3})
      .Strings("tokenizer.ggml.merges", {})
      .String("tokenizer.ggml.pre", "llama-bpe");
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto tokenizer, Load(builder));
  EXPECT_EQ(tokenizer->Encode("ab", {.parse_special = false}).value(),
            Ids({0, 1}));
  EXPECT_EQ(tokenizer->Encode("ab").value(), Ids({2}));
}

TEST(GgufTokenizerTest,
     TheVocabularyListsControlTokensThatOtherReadersWouldGiveAnotherId) {
  // Other programs that read the written tokenizer.json give each added token
  // that the vocabulary lacks the next free id.
  const auto vocabulary = [](const std::vector<int32_t>& types) {
    GgufBuilder builder;
    builder.String("tokenizer.ggml.model", "gpt2")
        .Strings("tokenizer.ggml.tokens", {"<a>", "b", "<c>", "<d>", "[PAD]"})
        .I32s("tokenizer.ggml.token_type", types)
        .String("tokenizer.ggml.pre", "gpt-2");
    const std::string file = builder.Build();
    const GgufHeader header =
        GgufHeader::Parse(file, file.size(), "x.gguf").value();
    const json tokenizer = json::parse(TokenizerOfGguf(header)->tokenizer_json);
    std::vector<int> ids;
    for (const auto& [token, id] : tokenizer["model"]["vocab"].items()) {
      ids.push_back(id);
    }
    return ids;
  };
  EXPECT_THAT(vocabulary({3, 1, 3, 3, 5}), ElementsAre(0, 1));
  EXPECT_THAT(vocabulary({3, 1, 3, 5, 3}), ElementsAre(0, 2, 4, 1));
  EXPECT_THAT(vocabulary({5, 1, 3, 3, 5}), ElementsAre(2, 3, 1));
}

// Returns a file with a SentencePiece tokenizer in which runs of spaces are
// user-defined tokens, as in Gemma.
GgufBuilder Runs(const std::string& architecture) {
  GgufBuilder builder;
  builder.String("general.architecture", architecture)
      .String("tokenizer.ggml.model", "llama")
      .Strings("tokenizer.ggml.tokens",
               {"<unk>", "<s>", "</s>", "a", "\xe2\x96\x81", "\n", "  ", "   ",
                "\xe2\x96\x81"
                "a",
                "<|end|>", "<|endoftext|>"})
      .I32s("tokenizer.ggml.token_type", {2, 3, 3, 1, 1, 1, 4, 4, 1, 3, 3})
      .F32s("tokenizer.ggml.scores",
            {0, 0, 0, -2, -3, -4, -1000, -1000, -1, -1000, -1000})
      .Bool("tokenizer.ggml.add_bos_token", false);
  return builder;
}

TEST(GgufTokenizerTest, GemmaTokenizersFindTheLongestRunOfSpacesAsOneToken) {
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const auto tokenizer,
      Load(Runs("gemma3").Bool("tokenizer.ggml.add_space_prefix", false)));
  for (const auto& [text, ids] :
       {std::pair("a", Ids({3})), std::pair(" a", Ids({8})),
        std::pair("a  a", Ids({3, 6, 3})), std::pair("a   a", Ids({3, 7, 3})),
        std::pair("    a", Ids({7, 8})),
        std::pair("<|end|>\n a", Ids({9, 5, 8}))}) {
    EXPECT_EQ(tokenizer->Encode(text).value(), ids) << text;
    EXPECT_EQ(tokenizer->Decode(ids, false), text);
  }
  // A mark in the original text counts as a space.
  EXPECT_EQ(tokenizer->Encode("a\xe2\x96\x81 a").value(), Ids({3, 6, 3}));
}

TEST(GgufTokenizerTest, ControlTokensOfPhi3TakeTheSpacesAfterThem) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto tokenizer, Load(Runs("phi3")));
  for (const auto& [text, ids] :
       {std::pair("<|end|>\n a", Ids({9, 8})),
        std::pair("<|end|>a", Ids({9, 8})),
        std::pair("<|endoftext|>\na", Ids({10, 4, 5, 3})),
        std::pair("<s>\na", Ids({1, 4, 5, 3}))}) {
    EXPECT_EQ(tokenizer->Encode(text).value(), ids) << text;
  }
}

struct BadTokenizer {
  std::string name;
  GgufBuilder builder;
  absl::StatusCode code;
  std::vector<std::string> parts;
};

GgufBuilder Gpt2(const std::vector<std::string>& tokens,
                 const std::vector<int32_t>& types,
                 const std::vector<std::string>& merges) {
  GgufBuilder builder;
  builder.String("tokenizer.ggml.model", "gpt2")
      .String("tokenizer.ggml.pre", "gpt-2")
      .Strings("tokenizer.ggml.tokens", tokens)
      .I32s("tokenizer.ggml.token_type", types)
      .Strings("tokenizer.ggml.merges", merges);
  return builder;
}

GgufBuilder Spm(const std::vector<std::string>& tokens,
                const std::vector<float>& scores) {
  GgufBuilder builder;
  builder.String("tokenizer.ggml.model", "llama")
      .Strings("tokenizer.ggml.tokens", tokens)
      .F32s("tokenizer.ggml.scores", scores);
  return builder;
}

std::vector<BadTokenizer> BadTokenizers() {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  constexpr auto kUnserved = absl::StatusCode::kUnimplemented;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  return {
      {"None", GgufBuilder(), absl::StatusCode::kNotFound, {"no tokenizer"}},
      {"WordPiece",
       GgufBuilder().String("tokenizer.ggml.model", "bert"),
       kUnserved,
       {"tokenizer.ggml.model", "\"bert\" is not served", "gpt2 and llama"}},
      {"UnknownSplit",
       Small().String("tokenizer.ggml.pre", "falcon"),
       kUnserved,
       {"tokenizer.ggml.pre", "\"falcon\"", "llama-bpe, "}},
      {"NoTokens", Gpt2({}, {}, {}), kInvalid, {"tokenizer.ggml.tokens"}},
      {"FewTypes",
       Gpt2({"a", "b"}, {1}, {}),
       kInvalid,
       {"token_type", "2 tokens", "have 1"}},
      {"UnknownType",
       Gpt2({"a"}, {7}, {}),
       kInvalid,
       {"token_type", "element 0 is 7"}},
      {"DuplicateToken",
       Gpt2({"a", "b", "a"}, {1, 1, 1}, {}),
       kInvalid,
       {"tokens 0 and 2 are both \"a\""}},
      {"TokenThatIsNotUtf8",
       Gpt2({"a", "\xff"}, {1, 1}, {}),
       kInvalid,
       {"token 1 is not valid UTF-8"}},
      {"MergeWithoutSpace",
       Gpt2({"a", "b"}, {1, 1}, {"ab"}),
       kInvalid,
       {"merges", "merge 0 is \"ab\""}},
      {"MergeOfAnUnknownToken",
       Gpt2({"a", "b", "ab"}, {1, 1, 1}, {"a b", "a c"}),
       kInvalid,
       {"merge 1 is \"a c\"", "no token \"c\""}},
      {"MergeThatGivesNoToken",
       Gpt2({"a", "b"}, {1, 1}, {"a b"}),
       kInvalid,
       {"no token \"ab\""}},
      // The merge "aa " consists of the token "aa" and an empty token.
      {"CyclicMerge",
       Gpt2({"a", "aa"}, {1, 1}, {"a a", "aa "}),
       kInvalid,
       {"merge 1 is \"aa \""}},
      {"IdBeyondTheTokens",
       Gpt2({"a"}, {1}, {}).U32("tokenizer.ggml.bos_token_id", 1),
       kInvalid,
       {"bos_token_id", "from 0 to 0, have 1"}},
      {"FewScores", Spm({"a", "b"}, {0}), kInvalid, {"scores", "have 1"}},
      {"ScoreThatIsNotANumber",
       Spm({"a", "b"}, {0, nan}),
       kInvalid,
       {"scores", "element 1 is nan"}},
      {"LongToken",
       Spm({std::string(257, 'a')}, {0}),
       kInvalid,
       {"token 0 has 257 bytes; want at most 256"}},
      {"NormalizerRules",
       Spm({"a"}, {0})
           .Array("tokenizer.ggml.precompiled_charsmap", GgufType::kU8, 1, "x"),
       kUnserved,
       {"precompiled_charsmap"}},
  };
}

// Each substring of the text is a token, so each token can be split anywhere.
TEST(GgufTokenizerTest, AVocabularyWithTooManyMergesIsRefused) {
  std::mt19937 random(5);
  std::string text;
  for (int i = 0; i < 256; ++i) {
    text += static_cast<char>('a' + random() % 26);
  }
  std::set<std::string> tokens;
  for (size_t begin = 0; begin < text.size(); ++begin) {
    for (size_t size = 1; begin + size <= text.size(); ++size) {
      tokens.insert(text.substr(begin, size));
    }
  }
  const absl::Status status = Load(Spm({tokens.begin(), tokens.end()},
                                       std::vector<float>(tokens.size(), 0.0f)))
                                  .status();
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument,
                               AllOf(HasSubstr("tokenizer.ggml.tokens"),
                                     HasSubstr("more than 2500000 merges"))));
}

class BadGgufTokenizerTest : public ::testing::TestWithParam<BadTokenizer> {};

TEST_P(BadGgufTokenizerTest,
       TheErrorForAnInvalidTokenizerNamesTheKeyAndThePlace) {
  const absl::Status status = Load(GetParam().builder).status();
  EXPECT_EQ(status.code(), GetParam().code) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("x.gguf"));
  for (const std::string& part : GetParam().parts) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(part));
  }
}

INSTANTIATE_TEST_SUITE_P(All, BadGgufTokenizerTest,
                         ::testing::ValuesIn(BadTokenizers()),
                         [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace kvasir::model
