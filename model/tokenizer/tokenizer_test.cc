#include "model/tokenizer/tokenizer.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/status_matchers.h"
#include "base/temp_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "model/tokenizer/detokenizer.h"
#include "model/tokenizer/tokenizer_json.h"
#include "model/tokenizer/utf8.h"
#include "nlohmann/json.hpp"

namespace kvasir::model {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using Code = absl::StatusCode;
using Ids = std::vector<int32_t>;

std::string GoldenPath(const std::string& name) {
  const char* dir = std::getenv("KVASIR_SOURCE_DIR");
  return std::string(dir ? dir : ".") + "/tests/golden/tokenizers/" + name;
}

std::unique_ptr<Tokenizer> Golden(const std::string& name) {
  auto tokenizer = Tokenizer::Load(GoldenPath(name));
  KVASIR_EXPECT_OK(tokenizer);
  return *std::move(tokenizer);
}

// A small valid tokenizer.json.
json SmallFile() {
  return json::parse(R"({
    "added_tokens": [{"id": 5, "content": "<s>", "special": true}],
    "normalizer": {"type": "Lowercase"},
    "pre_tokenizer": {"type": "Metaspace", "replacement": "_",
                      "prepend_scheme": "never"},
    "post_processor": {"type": "TemplateProcessing",
      "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                 {"Sequence": {"id": "A", "type_id": 0}}],
      "special_tokens": {"<s>": {"id": "<s>", "ids": [5], "tokens": ["<s>"]}}},
    "decoder": {"type": "Metaspace", "replacement": "_"},
    "model": {"type": "BPE", "unk_token": "?",
      "vocab": {"?": 0, "a": 1, "b": 2, "ab": 3, "_": 4},
      "merges": [["a", "b"]]}})");
}

TEST(TokenizerTest, ATokenizerFromASmallFileEncodesText) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto tokenizer,
                              Tokenizer::FromJson(SmallFile().dump()));
  KVASIR_ASSERT_OK_AND_ASSIGN(const Ids ids, tokenizer->Encode("AB ab?c"));
  EXPECT_EQ(ids, (Ids{5, 3, 4, 3, 0, 0}));
  EXPECT_EQ(tokenizer->vocab_size(), 6);
  EXPECT_EQ(tokenizer->TokenToId("<s>"), 5);
  EXPECT_EQ(tokenizer->TokenToId("nothing"), std::nullopt);
  EXPECT_EQ(tokenizer->IdToToken(3), "ab");
  EXPECT_EQ(tokenizer->IdToToken(-1), "");
  EXPECT_EQ(tokenizer->IdToToken(6), "");
  EXPECT_TRUE(tokenizer->IsSpecial(5));
  EXPECT_FALSE(tokenizer->IsSpecial(3));
  EXPECT_FALSE(tokenizer->IsSpecial(1 << 30));
  EXPECT_EQ(tokenizer->Decode(Ids{5, 3, -7, 99, 4, 3}, true), "ab ab");
}

// This test would take hours if each space searched the rest of the
// whitespace again.
TEST(TokenizerTest,
     AMegabyteOfSpacesIsScannedOnlyOnceForATokenThatStripsSpaces) {
  json file = SmallFile();
  file["added_tokens"][0] = {{"id", 5},          {"content", " "},
                             {"special", false}, {"normalized", false},
                             {"rstrip", true},   {"lstrip", true}};
  file.erase("post_processor");
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto tokenizer,
                              Tokenizer::FromJson(file.dump()));
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const Ids ids,
      tokenizer->Encode("a" + std::string(size_t{1} << 20, ' ') + "b"));
  EXPECT_EQ(ids, (Ids{1, 5, 2}));
}

struct Mutation {
  const char* name;
  std::function<void(json&)> apply;
  Code code;
  const char* words;  // the error must contain this
};

std::vector<Mutation> HostileModels() {
  return {
      {"no model", [](json& f) { f.erase("model"); }, Code::kInvalidArgument,
       "tokenizer.model is missing"},
      {"unigram", [](json& f) { f["model"]["type"] = "Unigram"; },
       Code::kUnimplemented, "model.type is \"Unigram\""},
      {"model is a list", [](json& f) { f["model"] = json::array(); },
       Code::kInvalidArgument, "tokenizer.model is an array of 0"},
      {"vocab is a list", [](json& f) { f["model"]["vocab"] = json::array(); },
       Code::kInvalidArgument, "model.vocab"},
      {"negative id", [](json& f) { f["model"]["vocab"]["a"] = -1; },
       Code::kInvalidArgument, "model.vocab[\"a\"] is -1"},
      {"huge id", [](json& f) { f["model"]["vocab"]["a"] = 4000000000u; },
       Code::kInvalidArgument, "model.vocab[\"a\"] is 4000000000"},
      {"id past 2^63",
       [](json& f) { f["model"]["vocab"]["a"] = 18446744073709551615u; },
       Code::kInvalidArgument, "model.vocab[\"a\"] is 18446744073709551615"},
      {"fractional id", [](json& f) { f["model"]["vocab"]["a"] = 1.5; },
       Code::kInvalidArgument, "model.vocab[\"a\"] is 1.5"},
      {"id twice", [](json& f) { f["model"]["vocab"]["a"] = 2; },
       Code::kInvalidArgument, "is 2, but that is also the id of"},
      {"id twice, once of the empty token",
       [](json& f) { f["model"]["vocab"][""] = 2; }, Code::kInvalidArgument,
       "is 2, but that is also the id of [\"\"]"},
      {"unknown merge part",
       [](json& f) {
         f["model"]["merges"].push_back({"a", "x"});
       },
       Code::kInvalidArgument, "merges[1] merges \"a\" and \"x\": the second"},
      {"unknown merge result",
       [](json& f) { f["model"]["merges"].push_back("b a"); },
       Code::kInvalidArgument, "the result is not in the vocabulary"},
      {"merge without space",
       [](json& f) { f["model"]["merges"].push_back("ab"); },
       Code::kInvalidArgument, "merges[1] is \"ab\""},
      {"merge of three",
       [](json& f) { f["model"]["merges"].push_back("a b a"); },
       Code::kInvalidArgument, "merges[1] is \"a b a\""},
      {"merge of numbers",
       [](json& f) {
         f["model"]["merges"].push_back({1, 2});
       },
       Code::kInvalidArgument, "merges[1] is an array of 2"},
      {"dropout", [](json& f) { f["model"]["dropout"] = 0.1; },
       Code::kUnimplemented, "model.dropout is 0.1"},
      {"word suffix",
       [](json& f) { f["model"]["end_of_word_suffix"] = "</w>"; },
       Code::kUnimplemented, "end_of_word_suffix is \"</w>\""},
      {"ignore_merges is text",
       [](json& f) { f["model"]["ignore_merges"] = "yes"; },
       Code::kInvalidArgument, "model.ignore_merges is \"yes\""},
  };
}

std::vector<Mutation> HostilePipelines() {
  return {
      {"foreign normalizer",
       [](json& f) { f["normalizer"]["type"] = "BertNormalizer"; },
       Code::kUnimplemented, "normalizer.type is \"BertNormalizer\""},
      {"foreign pre-tokenizer",
       [](json& f) { f["pre_tokenizer"]["type"] = "UnicodeScripts"; },
       Code::kUnimplemented, "pre_tokenizer.type is \"UnicodeScripts\""},
      {"foreign post-processor",
       [](json& f) { f["post_processor"]["type"] = "OtherProcessing"; },
       Code::kUnimplemented, "post_processor.type is \"OtherProcessing\""},
      {"processing with an id outside",
       [](json& f) {
         f["post_processor"] = {{"type", "RobertaProcessing"},
                                {"cls", {"<s>", 5}},
                                {"sep", {"</s>", 77}}};
       },
       Code::kInvalidArgument, "post_processor.sep[1] is 77"},
      {"processing with a token without an id",
       [](json& f) {
         f["post_processor"] = {{"type", "BertProcessing"}, {"cls", {"<s>"}}};
       },
       Code::kInvalidArgument, "want a token and its id"},
      {"foreign decoder", [](json& f) { f["decoder"]["type"] = "WordPiece"; },
       Code::kUnimplemented, "decoder.type is \"WordPiece\""},
      {"foreign prepend scheme",
       [](json& f) { f["pre_tokenizer"]["prepend_scheme"] = "sometimes"; },
       Code::kUnimplemented, "prepend_scheme is \"sometimes\""},
      {"long replacement",
       [](json& f) { f["pre_tokenizer"]["replacement"] = "__"; },
       Code::kInvalidArgument, "replacement is \"__\", want one character"},
      {"foreign behavior",
       [](json& f) {
         f["pre_tokenizer"] = {{"type", "Punctuation"}, {"behavior", "Eaten"}};
       },
       Code::kUnimplemented, "behavior is \"Eaten\""},
      {"pattern of nothing",
       [](json& f) {
         f["pre_tokenizer"] = {{"type", "Split"},
                               {"pattern", {{"String", ""}}},
                               {"behavior", "Isolated"}};
       },
       Code::kInvalidArgument, "pattern.String is \"\""},
      {"broken pattern",
       [](json& f) {
         f["pre_tokenizer"] = {{"type", "Split"},
                               {"pattern", {{"Regex", "(a"}}},
                               {"behavior", "Isolated"}};
       },
       Code::kInvalidArgument, "pattern.Regex: pattern \"(a\""},
      {"too many components",
       [](json& f) {
         f["normalizer"] = {{"type", "Sequence"},
                            {"normalizers", json::array()}};
         for (int i = 0; i < 100; ++i) {
           f["normalizer"]["normalizers"].push_back({{"type", "NFC"}});
         }
       },
       Code::kInvalidArgument, "at most 64 components"},
      {"template id outside",
       [](json& f) {
         f["post_processor"]["special_tokens"]["<s>"]["ids"] = {77};
       },
       Code::kInvalidArgument, "ids[0] is 77"},
      {"template token missing",
       [](json& f) { f["post_processor"]["special_tokens"] = json::object(); },
       Code::kInvalidArgument, "special_tokens.<s> is missing"},
      {"template without text",
       [](json& f) { f["post_processor"]["single"] = json::array(); },
       Code::kInvalidArgument, "want exactly one Sequence"},
      {"stripping forever",
       [](json& f) {
         f["decoder"] = {{"type", "Strip"},
                         {"content", " "},
                         {"start", 1000000000},
                         {"stop", 0}};
       },
       Code::kInvalidArgument, "strips 1000000000 characters"},
      {"decoder out of order",
       [](json& f) {
         f["decoder"] = {{"type", "Sequence"},
                         {"decoders",
                          {{{"type", "Fuse"}},
                           {{"type", "Metaspace"}, {"replacement", "_"}}}}};
       },
       Code::kUnimplemented, "decoders[1].type is \"Metaspace\""},
      {"added id taken", [](json& f) { f["added_tokens"][0]["id"] = 3; },
       Code::kInvalidArgument,
       "added_tokens[0] gives \"<s>\" id 3, but that is the id of \"ab\""},
      {"added id disagrees",
       [](json& f) { f["added_tokens"][0]["content"] = "ab"; },
       Code::kInvalidArgument, "id 5, but the vocabulary gives it 3"},
      {"added id wild",
       [](json& f) { f["added_tokens"][0]["id"] = 2000000000; },
       Code::kInvalidArgument, "id 2000000000, but ids must be below"},
      {"added id beyond the unused ones",
       [](json& f) { f["added_tokens"][0]["id"] = 6 + kMaxUnusedIds; },
       Code::kInvalidArgument, "ids must be below 65542"},
      {"vocabulary id beyond the unused ones",
       [](json& f) { f["model"]["vocab"]["ab"] = 6 + kMaxUnusedIds; },
       Code::kInvalidArgument, "an integer from 0 to 65541"},
      {"added twice with different ids",
       [](json& f) {
         f["added_tokens"].push_back({{"id", 6}, {"content", "<s>"}});
       },
       Code::kInvalidArgument, "gives \"<s>\" id 6, but also id 5"},
      {"one id for two added tokens",
       [](json& f) {
         f["added_tokens"].push_back({{"id", 5}, {"content", "<t>"}});
       },
       Code::kInvalidArgument, "id 5, but that is the id of \"<s>\""},
      {"added token too long",
       [](json& f) {
         f["added_tokens"][0]["content"] = std::string(5000, 'x');
       },
       Code::kInvalidArgument, "content has 5000 bytes"},
  };
}

TEST(TokenizerTest, ErrorsForHostileFilesNameTheFieldAndItsValue) {
  std::vector<Mutation> mutations = HostileModels();
  for (const Mutation& m : HostilePipelines()) mutations.push_back(m);
  for (const Mutation& m : mutations) {
    json file = SmallFile();
    m.apply(file);
    EXPECT_THAT(Tokenizer::FromJson(file.dump(), {}, "dir/tokenizer.json"),
                base::StatusIs(m.code, testing::AllOf(HasSubstr(m.words),
                                                      HasSubstr("tokenizer"))))
        << m.name;
  }
}

TEST(TokenizerTest, TheErrorForAFileThatIsNotJsonNamesTheFile) {
  for (const std::string& text :
       {std::string(), std::string("{"), std::string("{\"model\": \xFF}"),
        std::string("[]"), std::string("null"), SmallFile().dump() + "x",
        SmallFile().dump().substr(0, 200)}) {
    EXPECT_THAT(Tokenizer::FromJson(text, {}, "some/tokenizer.json"),
                base::StatusIs(Code::kInvalidArgument,
                               HasSubstr("some/tokenizer.json")))
        << text;
  }
}

TEST(TokenizerTest,
     FilesWithDeepNestingOrTooManyValuesAreRefusedBeforeParsing) {
  EXPECT_THAT(Tokenizer::FromJson(std::string(1000000, '[')),
              base::StatusIs(Code::kInvalidArgument, HasSubstr("deeper")));
  std::string wide = "[0";
  for (int i = 0; i < 9'000'000; ++i) wide += ",0";
  EXPECT_THAT(Tokenizer::FromJson(wide + "]"),
              base::StatusIs(Code::kInvalidArgument, HasSubstr("values")));
}

TEST(TokenizerTest, ATextThatReplacementsMakeTooLongIsRefused) {
  json file = SmallFile();
  file["normalizer"] = {{"type", "Replace"},
                        {"pattern", {{"String", "a"}}},
                        {"content", std::string(1 << 20, 'b')}};
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto tokenizer,
                              Tokenizer::FromJson(file.dump()));
  EXPECT_THAT(tokenizer->Encode(std::string(1000, 'a')),
              base::StatusIs(Code::kInvalidArgument, HasSubstr("1000")));
}

json ListOf(size_t count, const json& step, const char* key) {
  return {{"type", "Sequence"}, {key, json(std::vector<json>(count, step))}};
}

// Each of the chained steps doubles the text and cuts it into more pieces.
TEST(TokenizerTest, AllChainedByteLevelStepsShareOneMemoryLimit) {
  const json step = {{"type", "ByteLevel"}};
  std::string text;
  for (int i = 0; i < 3000; ++i) text += "\u00e9";
  json file = SmallFile();
  for (const size_t count : {15, 64 - 1}) {
    file["pre_tokenizer"] = ListOf(count, step, "pretokenizers");
    KVASIR_ASSERT_OK_AND_ASSIGN(const auto tokenizer,
                                Tokenizer::FromJson(file.dump()));
    EXPECT_THAT(
        tokenizer->Encode(text),
        base::StatusIs(
            Code::kInvalidArgument,
            HasSubstr("for a text of 6000 bytes, but the limit is 17545216")));
  }
}

TEST(TokenizerTest, AllChainedReplaceStepsShareOneMemoryLimit) {
  json file = SmallFile();
  file["normalizer"] = ListOf(
      30,
      {{"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", "aa"}},
      "normalizers");
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto tokenizer,
                              Tokenizer::FromJson(file.dump()));
  EXPECT_THAT(
      tokenizer->Encode(std::string(6000, 'a')),
      base::StatusIs(Code::kInvalidArgument, HasSubstr("may give more than")));
}

TEST(TokenizerTest, AllSegmentsOfATextShareOneMemoryLimit) {
  json file = SmallFile();
  file["normalizer"] = {{"type", "Replace"},
                        {"pattern", {{"String", "a"}}},
                        {"content", std::string(1 << 20, 'b')}};
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto tokenizer,
                              Tokenizer::FromJson(file.dump()));
  KVASIR_EXPECT_OK(tokenizer->Encode("a<s>a<s>a").status());
  std::string text;
  for (int i = 0; i < 20; ++i) text += "a<s>";
  EXPECT_THAT(
      tokenizer->Encode(text),
      base::StatusIs(Code::kInvalidArgument, HasSubstr("may give more than")));
}

// The most demanding valid file cuts a text into single bytes and rewrites
// them twice.
TEST(TokenizerTest,
     ATextOfOneMebibyteThatIsSplitIntoSingleBytesFitsTheMemoryLimit) {
  json file = SmallFile();
  file["pre_tokenizer"] = {
      {"type", "Sequence"},
      {"pretokenizers",
       {{{"type", "Split"},
         {"pattern", {{"Regex", "."}}},
         {"behavior", "Isolated"},
         {"invert", false}},
        {{"type", "Metaspace"},
         {"replacement", "_"},
         {"prepend_scheme", "never"}},
        {{"type", "ByteLevel"},
         {"add_prefix_space", false},
         {"use_regex", false}},
        {{"type", "Digits"}, {"individual_digits", true}}}}};
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto tokenizer,
                              Tokenizer::FromJson(file.dump()));
  KVASIR_EXPECT_OK(
      tokenizer->Encode(std::string(size_t{1} << 20, 'a')).status());
}

TEST(TokenizerTest, ATokenizerOfVocabJsonAndMergesTxtIsReportedAsUnsupported) {
  const base::TempFolder folder;
  for (const char* name : {"vocab.json", "merges.txt"}) folder.Write(name, "");
  EXPECT_THAT(Tokenizer::Load(folder.path()),
              base::StatusIs(
                  Code::kFailedPrecondition,
                  ::testing::AllOf(HasSubstr("tokenizer.json is missing"),
                                   HasSubstr("merges.txt are not supported"))));
}

TEST(TokenizerTest, AMissingTokenizerFileIsReportedAsNotFound) {
  EXPECT_THAT(Tokenizer::Load("/nonexistent/dir"),
              base::StatusIs(Code::kNotFound, HasSubstr("/nonexistent/dir")));
}

TEST(TokenizerTest, ATextAboveTheLengthLimitIsRefused) {
  const auto tokenizer = Golden("gpt2");
  const std::string text(Tokenizer::kMaxTextBytes + 1, 'a');
  EXPECT_THAT(tokenizer->Encode(text),
              base::StatusIs(Code::kInvalidArgument, HasSubstr("67108865")));
}

TEST(TokenizerTest, ATextWithMoreTokensThanTheCallerAllowsIsRefused) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto tokenizer,
                              Tokenizer::FromJson(SmallFile().dump()));
  EncodeOptions options;
  options.max_ids = 5;
  KVASIR_ASSERT_OK_AND_ASSIGN(const Ids ids,
                              tokenizer->Encode("AB ab?c", options));
  EXPECT_EQ(ids.size(), 6u) << "with one token of the template";
  options.max_ids = 4;
  EXPECT_THAT(
      tokenizer->Encode("AB ab?c", options).status(),
      base::StatusIs(Code::kOutOfRange, HasSubstr("more than 4 tokens")));
  options.max_ids = 1000;
  EXPECT_THAT(
      tokenizer->Encode(std::string(size_t{1} << 20, 'a'), options).status(),
      base::StatusIs(Code::kOutOfRange, HasSubstr("more than 1000")));
}

// A long text may have few tokens, because several unknown characters may share
// one token and spaces may be dropped.
TEST(TokenizerTest, ALongTextIsEncodedIfItHasFewTokens) {
  EncodeOptions options;
  options.add_special_tokens = false;
  options.max_ids = 1;
  json fuses = SmallFile();
  fuses["model"]["fuse_unk"] = true;
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto fusing,
                              Tokenizer::FromJson(fuses.dump()));
  KVASIR_ASSERT_OK_AND_ASSIGN(
      Ids ids, fusing->Encode(std::string(size_t{1} << 16, 'z'), options));
  EXPECT_EQ(ids, (Ids{0}));
  json merges = SmallFile();
  merges["model"]["vocab"]["??"] = 6;
  merges["model"]["merges"].push_back({"?", "?"});
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto merging,
                              Tokenizer::FromJson(merges.dump()));
  // Two characters of four bytes each become one token.
  KVASIR_ASSERT_OK_AND_ASSIGN(
      ids, merging->Encode("\xF0\x9F\x98\x80\xF0\x9F\x98\x80", options));
  EXPECT_EQ(ids, (Ids{6}));
  json drops = SmallFile();
  drops["pre_tokenizer"] = {{"type", "WhitespaceSplit"}};
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto dropping,
                              Tokenizer::FromJson(drops.dump()));
  KVASIR_ASSERT_OK_AND_ASSIGN(
      ids, dropping->Encode(std::string(size_t{1} << 16, ' ') + "a", options));
  EXPECT_EQ(ids, (Ids{1}));
}

TEST(TokenizerTest, InvalidUtf8IsEncodedAsReplacementCharacters) {
  for (const char* name : {"gpt2", "llama2"}) {
    const auto tokenizer = Golden(name);
    KVASIR_ASSERT_OK_AND_ASSIGN(const Ids got,
                                tokenizer->Encode("a\xF0\x9F\x99 b\xFF"));
    KVASIR_ASSERT_OK_AND_ASSIGN(
        const Ids want, tokenizer->Encode("a\xEF\xBF\xBD b\xEF\xBF\xBD"));
    EXPECT_EQ(got, want);
  }
}

// Encodes a word as BPE is defined: repeatedly applies the merge with the
// lowest rank, the leftmost one first.
Ids MergedByDefinition(const json& model, const std::string& word) {
  std::vector<std::string> parts;
  for (const char c : word) parts.emplace_back(1, c);
  std::map<std::pair<std::string, std::string>, int> rank;
  for (const json& merge : model["merges"]) {
    rank.emplace(std::pair(merge[0], merge[1]), static_cast<int>(rank.size()));
  }
  for (;;) {
    size_t best = parts.size();
    int best_rank = INT_MAX;
    for (size_t i = 0; i + 1 < parts.size(); ++i) {
      const auto it = rank.find({parts[i], parts[i + 1]});
      if (it != rank.end() && it->second < best_rank) {
        best = i;
        best_rank = it->second;
      }
    }
    if (best == parts.size()) break;
    parts[best] += parts[best + 1];
    parts.erase(parts.begin() + static_cast<ptrdiff_t>(best) + 1);
  }
  Ids ids;
  for (const std::string& part : parts) ids.push_back(model["vocab"][part]);
  return ids;
}

TEST(TokenizerTest,
     BpeMergesEqualThoseOfANaiveImplementationForWordsOfAnyLength) {
  std::mt19937 random(11);
  json model = {{"vocab", json::object()}, {"merges", json::array()}};
  std::vector<std::string> tokens = {"a", "b", "c"};
  while (tokens.size() < 60) {
    const std::string left = tokens[random() % tokens.size()];
    const std::string right = tokens[random() % tokens.size()];
    const std::string both = left + right;
    if (both.size() > 9) continue;
    const bool known =
        std::find(tokens.begin(), tokens.end(), both) != tokens.end();
    // Keeps one in four merges whose token another merge already gives, because
    // real files have such merges.
    if (known && random() % 4 != 0) continue;
    bool repeated = false;
    for (const json& merge : model["merges"]) {
      repeated = repeated || (merge[0] == left && merge[1] == right);
    }
    if (repeated) continue;
    model["merges"].push_back({left, right});
    if (!known) tokens.push_back(both);
  }
  for (size_t i = 0; i < tokens.size(); ++i) model["vocab"][tokens[i]] = i;
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const auto tokenizer, Tokenizer::FromJson(json{{"model", model}}.dump()));
  for (int i = 0; i < 3000; ++i) {
    std::string word;
    const size_t length = 1 + random() % (i % 10 == 0 ? 200 : 24);
    for (size_t k = 0; k < length; ++k) word.push_back("abc"[random() % 3]);
    // Encodes twice, because the second time the model may already know whether
    // the word is a token.
    for (int repeat = 0; repeat < 2; ++repeat) {
      KVASIR_ASSERT_OK_AND_ASSIGN(const Ids got, tokenizer->Encode(word));
      ASSERT_EQ(got, MergedByDefinition(model, word)) << word;
    }
  }
}

TEST(TokenizerTest, EncodingAVeryLongWordTakesNearLinearTime) {
  // Quadratic work on a million letters would exceed the timeout.
  for (const char* name : {"gpt2", "llama2", "llama3"}) {
    const auto tokenizer = Golden(name);
    const std::string word(1'000'000, 'e');
    KVASIR_ASSERT_OK_AND_ASSIGN(const Ids ids, tokenizer->Encode(word));
    EXPECT_EQ(tokenizer->Decode(ids, true), word);
  }
}

TEST(TokenizerTest, ManyThreadsCanUseOneTokenizer) {
  const auto tokenizer = Golden("gpt2");
  std::string text;
  for (int i = 0; i < 300; ++i) text += "The miller's river, 12 boats; ";
  KVASIR_ASSERT_OK_AND_ASSIGN(const Ids want, Golden("gpt2")->Encode(text));
  std::vector<Ids> got(4);
  {
    std::vector<std::jthread> threads;
    for (Ids& ids : got) {
      threads.emplace_back(
          [&ids, &tokenizer, &text] { ids = *tokenizer->Encode(text); });
    }
  }
  for (const Ids& ids : got) EXPECT_EQ(ids, want);
}

TEST(TokenizerTest, TokenBytesReturnsTheBytesThatATokenAddsToTheText) {
  const auto gpt2 = Golden("gpt2");
  const auto llama2 = Golden("llama2");
  EXPECT_EQ(llama2->TokenBytes(*llama2->TokenToId("<0x0A>")), "\n");
  EXPECT_EQ(llama2->TokenBytes(*llama2->TokenToId("<0xE6>")), "\xE6");
  EXPECT_EQ(llama2->TokenBytes(*llama2->TokenToId("<s>")), "<s>");
  EXPECT_EQ(gpt2->TokenBytes(-1), "");
  // Without special tokens, the bytes of all tokens together are the text.
  const std::string text = "x 12 \xE6\xB2\xB3\xF0\x9F\x99\x82\n the boats";
  for (const auto& tokenizer : {gpt2.get(), llama2.get()}) {
    KVASIR_ASSERT_OK_AND_ASSIGN(
        const Ids ids, tokenizer->Encode(text, {.add_special_tokens = false}));
    std::string bytes;
    for (const int32_t id : ids) bytes += tokenizer->TokenBytes(id);
    EXPECT_EQ(bytes, tokenizer == llama2.get() ? " " + text : text);
  }
}

TEST(TokenizerTest, ReadsTheChatTemplateFromAFileAndFromAListOfTemplates) {
  const base::TempFolder dir;
  dir.Write("tokenizer.json", SmallFile().dump());
  dir.Write("tokenizer_config.json",
            R"({"bos_token": "<s>", "eos_token": "<none>", "chat_template":
           [{"name": "tool_use", "template": "t"},
            {"name": "default", "template": "d"}]})");
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto listed, Tokenizer::Load(dir.path()));
  EXPECT_EQ(listed->bos_id(), 5);
  EXPECT_EQ(listed->eos_ids(), Ids{6})
      << "a new token, as AutoTokenizer has it";
  EXPECT_EQ(listed->chat_template(), "d");
  dir.Write("chat_template.jinja", "from file");
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto filed, Tokenizer::Load(dir.path()));
  EXPECT_EQ(filed->chat_template(), "from file");
  EXPECT_EQ(filed->hash(), listed->hash());
  dir.Write("tokenizer_config.json", R"({"bos_token": 7})");
  EXPECT_THAT(Tokenizer::Load(dir.path()),
              base::StatusIs(Code::kInvalidArgument,
                             HasSubstr("config.bos_token is 7")));
}

}  // namespace
}  // namespace kvasir::model
