// Compares the tokenizers with recorded ids and texts of the reference
// implementation in tests/golden/tokenizers (see the README there).
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "gtest/gtest.h"
#include "model/tokenizer/detokenizer.h"
#include "model/tokenizer/tokenizer.h"
#include "nlohmann/json.hpp"

namespace kvasir::model {
namespace {

using nlohmann::json;
using Ids = std::vector<int32_t>;

std::filesystem::path SourceDir() {
  const char* dir = std::getenv("KVASIR_SOURCE_DIR");
  return dir ? dir : ".";
}
std::filesystem::path Folder() {
  return SourceDir() / "tests" / "golden" / "tokenizers";
}

std::string ReadText(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string Streamed(const Tokenizer& tokenizer, const Ids& ids,
                     bool skip_special) {
  IncrementalDetokenizer stream(tokenizer, skip_special);
  std::string text;
  for (const int32_t id : ids) text += stream.Push(id);
  return text + stream.Finish();
}

void ExpectDecoded(const Tokenizer& tokenizer, const json& entry,
                   const std::string& text) {
  const Ids ids = entry["ids"];
  const std::string decoded = entry.value("decoded", text);
  const std::string skipped = entry.value("decoded_skip_special", decoded);
  EXPECT_EQ(tokenizer.Decode(ids, false), decoded) << entry.dump();
  EXPECT_EQ(tokenizer.Decode(ids, true), skipped) << entry.dump();
  EXPECT_EQ(Streamed(tokenizer, ids, false), decoded) << entry.dump();
  EXPECT_EQ(Streamed(tokenizer, ids, true), skipped) << entry.dump();
}

void ExpectEncoded(const Tokenizer& tokenizer, const json& entry) {
  const std::string text = entry["text"];
  const Ids ids = entry["ids"];
  const Ids bare = entry.value("ids_no_special", ids);
  const Ids plain = entry.value("ids_plain", bare);
  KVASIR_ASSERT_OK_AND_ASSIGN(const Ids got, tokenizer.Encode(text));
  EXPECT_EQ(got, ids) << entry.dump();
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const Ids got_bare,
      tokenizer.Encode(text, {.add_special_tokens = false}));
  EXPECT_EQ(got_bare, bare) << entry.dump();
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const Ids got_plain, tokenizer.Encode(text, {.add_special_tokens = false,
                                                   .parse_special = false}));
  EXPECT_EQ(got_plain, plain) << entry.dump();
}

class GoldenTokenizerTest : public testing::TestWithParam<std::string> {};

TEST_P(GoldenTokenizerTest, TokenIdsAndTextsEqualThoseOfTheReferenceTokenizer) {
  const std::filesystem::path folder = Folder() / GetParam();
  const auto files =
      GetParam() == "tiny" ? SourceDir() / "models" / "tiny" : folder;
  if (GetParam() == "tiny" && !exists(folder / "cases.json")) {
    GTEST_SKIP() << "no cases for the built-in tokenizer";
  }
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto tokenizer,
                              Tokenizer::Load(files.string()));
  const json cases = json::parse(ReadText(folder / "cases.json"));
  ASSERT_GE(cases["encode"].size(), 60u);
  ASSERT_GE(cases["decode"].size(), 9u);
  for (const json& entry : cases["encode"]) {
    ExpectEncoded(*tokenizer, entry);
    ExpectDecoded(*tokenizer, entry, entry["text"]);
  }
  for (const json& entry : cases["decode"]) {
    ExpectDecoded(*tokenizer, entry, "");
  }
}

INSTANTIATE_TEST_SUITE_P(All, GoldenTokenizerTest,
                         testing::Values("gpt2", "gpt2-prefix-space", "llama3",
                                         "qwen2", "llama2", "mistral",
                                         "metaspace-decoder", "tiny"),
                         [](const auto& param_info) {
                           std::string name = param_info.param;
                           for (char& c : name) c = c == '-' ? '_' : c;
                           return name;
                         });

TEST(GoldenTokenizerTest, EveryGoldenTokenizerFolderIsTested) {
  int folders = 0;
  for (const auto& entry : std::filesystem::directory_iterator(Folder())) {
    folders += exists(entry.path() / "tokenizer.json");
  }
  EXPECT_EQ(folders, 7);
}

TEST(GoldenPipelineTest,
     TokenIdsEqualThoseOfTheReferenceForEveryNormalizerAndPreTokenizer) {
  const json base = json::parse(ReadText(Folder() / "pipelines/base.json"));
  const json variants =
      json::parse(ReadText(Folder() / "pipelines/variants.json"));
  ASSERT_GE(variants.size(), 30u);
  for (const json& variant : variants) {
    json file = base;
    file["normalizer"] = variant["normalizer"];
    file["pre_tokenizer"] = variant["pre_tokenizer"];
    KVASIR_ASSERT_OK_AND_ASSIGN(const auto tokenizer,
                                Tokenizer::FromJson(file.dump()));
    for (const json& entry : variant["cases"]) {
      KVASIR_ASSERT_OK_AND_ASSIGN(
          const Ids got, tokenizer->Encode(entry[0].get<std::string>()));
      EXPECT_EQ(got, entry[1].get<Ids>())
          << variant["normalizer"].dump() << variant["pre_tokenizer"].dump()
          << entry[0].dump();
    }
  }
}

TEST(GoldenNastyTest, TokenIdsAndTextsOfNastyStringsEqualThoseOfTheReference) {
  const auto folder = Folder() / "nasty";
  const json texts = json::parse(ReadText(folder / "texts.json"));
  const json rows = json::parse(ReadText(folder / "cases.json"));
  ASSERT_GE(texts.size(), 90u);
  ASSERT_GE(rows.size(), 25u);
  for (const json& row : rows) {
    const std::string name = row["name"];
    SCOPED_TRACE(name);
    json file;
    if (row.contains("base")) {
      const std::string base = row["base"];
      file = json::parse(ReadText(folder / (base + ".json")));
      file.update(row["change"]);
    } else {
      file = json::parse(ReadText(Folder() / name / "tokenizer.json"));
    }
    KVASIR_ASSERT_OK_AND_ASSIGN(const auto tokenizer,
                                Tokenizer::FromJson(file.dump()));
    ASSERT_EQ(row["ids"].size(), texts.size());
    for (size_t i = 0; i < texts.size(); ++i) {
      const Ids ids = row["ids"][i];
      KVASIR_ASSERT_OK_AND_ASSIGN(
          const Ids got, tokenizer->Encode(texts[i].get<std::string>(),
                                           {.add_special_tokens = false}));
      EXPECT_EQ(got, ids) << texts[i].dump();
      const json decoded = row["decoded"].value(std::to_string(i), texts[i]);
      if (decoded.is_null()) continue;
      EXPECT_EQ(Streamed(*tokenizer, ids, false), decoded);
    }
  }
}

TEST(GoldenTokenizerConfigTest, TheBosIdTheEosIdsAndTheChatTemplateAreRead) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto llama3,
                              Tokenizer::Load((Folder() / "llama3").string()));
  EXPECT_EQ(llama3->bos_id(), llama3->TokenToId("<|begin_of_text|>"));
  EXPECT_EQ(llama3->eos_ids(), Ids{*llama3->TokenToId("<|eot_id|>")});
  EXPECT_NE(llama3->chat_template().find("bos_token"), std::string::npos);
  EXPECT_TRUE(llama3->IsSpecial(*llama3->bos_id()));
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto qwen2,
                              Tokenizer::Load((Folder() / "qwen2").string()));
  EXPECT_EQ(qwen2->bos_id(), std::nullopt);
  EXPECT_EQ(qwen2->eos_ids(), Ids{*qwen2->TokenToId("<|im_end|>")});
  EXPECT_NE(qwen2->hash(), llama3->hash());
  EXPECT_EQ(qwen2->hash().size(), 64u);
}

}  // namespace
}  // namespace kvasir::model
