// Compares tokenizers that are made from tokenizer.json and other files with
// those that AutoTokenizer of transformers 4.57.1 makes (tokenizers 0.22.2).
#include "model/tokenizer/tokenizer_config.h"

#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "base/temp_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "model/tokenizer/tokenizer.h"
#include "nlohmann/json.hpp"

namespace kvasir::model {
namespace {

using base::StatusIs;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;
using Ids = std::vector<int32_t>;

constexpr char kText[] = "z<a> <s> <v> <n> z";

// A file with one token for each printable character, the tokens <v> and <w>,
// which are only in the vocabulary, and the added tokens <a> and <s>.
json SmallFile() {
  json file = json::parse(R"({
    "added_tokens": [
      {"id": 98, "content": "<a>", "special": false, "normalized": false},
      {"id": 99, "content": "<s>", "special": true, "normalized": false}],
    "decoder": {"type": "Fuse"},
    "model": {"type": "BPE", "merges": [],
              "vocab": {" ": 94, "\u0120": 95, "<v>": 96, "<w>": 97}}})");
  for (int c = '!'; c <= '~'; ++c) {
    file["model"]["vocab"][std::string(1, static_cast<char>(c))] = c - '!';
  }
  return file;
}

struct Row {
  const char* fact;
  const char* tokenizer_class = "PreTrainedTokenizerFast";
  const char* config = "{}";  // the other fields of tokenizer_config.json
  const char* map = "";       // special_tokens_map.json
  const char* added = "";     // added_tokens.json
  const char* file = "{}";    // members that replace those of SmallFile()
  const char* tokens;         // the tokens of kText
  const char* shown;          // `tokens` as text, without special tokens
  const char* more = "";      // the tokens from id 100
  const char* bos = "";
  const char* eos = "";
};

absl::StatusOr<std::unique_ptr<Tokenizer>> LoadRow(const Row& row) {
  json file = SmallFile();
  file.update(json::parse(row.file));
  // tokenizer_class comes first; the other fields keep their order in the row.
  std::string config = row.config;
  config = std::string("{\"tokenizer_class\": \"") + row.tokenizer_class +
           "\"" + (config == "{}" ? "" : ", ") + config.substr(1);
  return Tokenizer::FromFiles({.tokenizer = file.dump(),
                               .config = config,
                               .special_tokens_map = row.map,
                               .added_tokens = row.added});
}

std::string Joined(const Tokenizer& tokenizer, const Ids& ids,
                   const char* separator) {
  std::string text;
  for (const int32_t id : ids) {
    if (!text.empty()) text += separator;
    text += tokenizer.IdToToken(id);
  }
  return text;
}

const std::vector<Row>& Rows() {
  static const auto* const
      rows =
          new std::vector<Row>{
              {.fact = "NothingMore",
               .tokens = "z|<a>| |<s>| |<|v|>| |<|n|>| |z",
               .shown = "z<a>  <v> <n> z"},
              {.fact = "FlagsInTheDecoder",
               .config =
                   R"({"added_tokens_decoder": {"98": {"content": "<a>", "rstrip": true, "normalized": false}}})",
               .tokens = "z|<a>|<s>| |<|v|>| |<|n|>| |z",
               .shown = "z<a> <v> <n> z"},
              {.fact = "SpecialInTheDecoder",
               .config =
                   R"({"added_tokens_decoder": {"98": {"content": "<a>", "special": true, "normalized": false}}})",
               .tokens = "z|<a>| |<s>| |<|v|>| |<|n|>| |z",
               .shown = "z  <v> <n> z"},
              {.fact = "ASpecialTokenStaysSpecial",
               .config =
                   R"({"added_tokens_decoder": {"99": {"content": "<s>", "rstrip": true, "normalized": false}}})",
               .tokens = "z|<a>| |<s>|<|v|>| |<|n|>| |z",
               .shown = "z<a> <v> <n> z"},
              {.fact = "OfTheVocabularyInTheDecoder",
               .config =
                   R"({"added_tokens_decoder": {"96": {"content": "<v>", "special": true, "normalized": false}}})",
               .tokens = "z|<a>| |<s>| |<v>| |<|n|>| |z",
               .shown = "z<a>   <n> z"},
              {.fact = "NewInTheDecoder",
               .config =
                   R"({"added_tokens_decoder": {"100": {"content": "<n>", "normalized": false}}})",
               .tokens = "z|<a>| |<s>| |<|v|>| |<n>| |z",
               .shown = "z<a>  <v> <n> z",
               .more = "<n>"},
              {.fact = "TheDecodersIdDoesNotCount",
               .config =
                   R"({"added_tokens_decoder": {"300": {"content": "<n>", "special": true, "normalized": false}, "7": {"content": "<v>", "normalized": false}}})",
               .tokens = "z|<a>| |<s>| |<v>| |<n>| |z",
               .shown = "z<a>  <v>  z",
               .more = "<n>"},
              {.fact = "ContentAloneInTheDecoder",
               .config =
                   R"({"added_tokens_decoder": {"96": {"content": "<v>"}}})",
               .tokens = "z|<a>| |<s>| |<v>| |<|n|>| |z",
               .shown = "z<a>  <v> <n> z"},
              {.fact = "TwiceInTheDecoder",
               .config =
                   R"({"added_tokens_decoder": {"98": {"content": "<a>", "rstrip": true, "normalized": false}, "200": {"content": "<a>", "lstrip": true, "normalized": false}}})",
               .tokens = "z|<a>| |<s>| |<|v|>| |<|n|>| |z",
               .shown = "z<a>  <v> <n> z"},
              {.fact = "TheFilesFlagsLastInTheDecoder",
               .config =
                   R"({"added_tokens_decoder": {"98": {"content": "<a>", "rstrip": true, "normalized": false}, "200": {"content": "<a>", "normalized": false}}})",
               .tokens = "z|<a>|<s>| |<|v|>| |<|n|>| |z",
               .shown = "z<a> <v> <n> z"},
              {.fact = "BosAsString",
               .config = R"({"bos_token": "<v>"})",
               .tokens = "z|<a>| |<s>| |<v>| |<|n|>| |z",
               .shown = "z<a>   <n> z",
               .bos = "<v>"},
              {.fact = "BosAsStringOfAnAddedToken",
               .config = R"({"bos_token": "<a>"})",
               .tokens = "z|<a>| |<s>| |<|v|>| |<|n|>| |z",
               .shown = "z  <v> <n> z",
               .bos = "<a>"},
              {.fact = "BosAsStringOfAnAddedTokenBesideADecoder",
               .config = R"({"bos_token": "<a>", "added_tokens_decoder": {}})",
               .tokens = "z|<a>| |<s>| |<|v|>| |<|n|>| |z",
               .shown = "z<a>  <v> <n> z",
               .bos = "<a>"},
              {.fact = "BosAsStringOfADecodersToken",
               .config =
                   R"({"bos_token": "<a>", "added_tokens_decoder": {"98": {"content": "<a>", "rstrip": true, "normalized": false}}})",
               .tokens = "z|<a>|<s>| |<|v|>| |<|n|>| |z",
               .shown = "z <v> <n> z",
               .bos = "<a>"},
              {.fact = "BosAsObject",
               .config =
                   R"({"bos_token": {"__type": "AddedToken", "content": "<v>", "rstrip": true, "normalized": false}})",
               .tokens = "z|<a>| |<s>| |<v>|<|n|>| |z",
               .shown = "z<a>  <n> z",
               .bos = "<v>"},
              {.fact = "BosAsObjectOfAnAddedToken",
               .config =
                   R"({"bos_token": {"__type": "AddedToken", "content": "<a>", "rstrip": true, "normalized": false}})",
               .tokens = "z|<a>| |<s>| |<|v|>| |<|n|>| |z",
               .shown = "z  <v> <n> z",
               .bos = "<a>"},
              {.fact = "BosAsObjectBesideADecoder",
               .config =
                   R"({"bos_token": {"__type": "AddedToken", "content": "<a>", "rstrip": true, "normalized": false}, "added_tokens_decoder": {}})",
               .tokens = "z|<a>|<s>| |<|v|>| |<|n|>| |z",
               .shown = "z <v> <n> z",
               .bos = "<a>"},
              {.fact = "BosAsContentAlone",
               .config =
                   R"({"bos_token": {"__type": "AddedToken", "content": "<v>"}})",
               .tokens = "z|<a>| |<s>| |<v>| |<|n|>| |z",
               .shown = "z<a>   <n> z",
               .bos = "<v>"},
              {.fact = "BosEmptyOrNull",
               .config = R"({"bos_token": "", "eos_token": null})",
               .tokens = "z|<a>| |<s>| |<|v|>| |<|n|>| |z",
               .shown = "z<a>  <v> <n> z"},
              {.fact = "EosAsString",
               .config = R"({"eos_token": "<v>"})",
               .tokens = "z|<a>| |<s>| |<v>| |<|n|>| |z",
               .shown = "z<a>   <n> z",
               .eos = "<v>"},
              {.fact = "UnkAsString",
               .config = R"({"unk_token": "<v>"})",
               .tokens = "z|<a>| |<s>| |<v>| |<|n|>| |z",
               .shown = "z<a>   <n> z"},
              {.fact = "SepAsString",
               .config = R"({"sep_token": "<v>"})",
               .tokens = "z|<a>| |<s>| |<v>| |<|n|>| |z",
               .shown = "z<a>   <n> z"},
              {.fact = "PadAsString",
               .config = R"({"pad_token": "<v>"})",
               .tokens = "z|<a>| |<s>| |<v>| |<|n|>| |z",
               .shown = "z<a>   <n> z"},
              {.fact = "ClsAsString",
               .config = R"({"cls_token": "<v>"})",
               .tokens = "z|<a>| |<s>| |<v>| |<|n|>| |z",
               .shown = "z<a>   <n> z"},
              {.fact = "MaskAsObject",
               .config =
                   R"({"mask_token": {"__type": "AddedToken", "content": "<v>", "lstrip": true, "normalized": false}})",
               .tokens = "z|<a>| |<s>|<v>| |<|n|>| |z",
               .shown = "z<a>  <n> z"},
              {.fact = "PadOutsideTheVocabulary",
               .config = R"({"pad_token": "<n>"})",
               .tokens = "z|<a>| |<s>| |<|v|>| |<n>| |z",
               .shown = "z<a>  <v>  z",
               .more = "<n>"},
              {.fact = "TwoNamesOfOneToken",
               .config =
                   R"({"bos_token": {"__type": "AddedToken", "content": "<v>", "rstrip": true, "normalized": false}, "eos_token": {"__type": "AddedToken", "content": "<v>", "lstrip": true, "normalized": false}})",
               .tokens = "z|<a>| |<s>| |<v>|<|n|>| |z",
               .shown = "z<a>  <n> z",
               .bos = "<v>",
               .eos = "<v>"},
              {.fact = "AdditionalStrings",
               .config =
                   R"({"additional_special_tokens": ["<v>", "<n>", "<a>"]})",
               .tokens = "z|<a>| |<s>| |<v>| |<n>| |z",
               .shown = "z    z",
               .more = "<n>"},
              {.fact = "AdditionalStringsBesideADecoder",
               .config =
                   R"({"additional_special_tokens": ["<v>", "<n>", "<a>"], "added_tokens_decoder": {}})",
               .tokens = "z|<a>| |<s>| |<v>| |<n>| |z",
               .shown = "z<a>    z",
               .more = "<n>"},
              {.fact = "AdditionalObjects",
               .config =
                   R"({"additional_special_tokens": [{"__type": "AddedToken", "content": "<v>", "rstrip": true, "normalized": false}, {"__type": "AddedToken", "content": "<a>", "rstrip": true, "normalized": false}]})",
               .tokens = "z|<a>|<s>| |<v>|<|n|>| |z",
               .shown = "z <n> z"},
              {.fact = "AdditionalObjectOfADecodersToken",
               .config =
                   R"({"additional_special_tokens": [{"__type": "AddedToken", "content": "<v>", "rstrip": true, "normalized": false}], "added_tokens_decoder": {"96": {"content": "<v>", "normalized": false}}})",
               .tokens = "z|<a>| |<s>| |<v>|<|n|>| |z",
               .shown = "z<a>  <n> z"},
              {.fact = "AdditionalNull",
               .config = R"({"additional_special_tokens": null})",
               .tokens = "z|<a>| |<s>| |<|v|>| |<|n|>| |z",
               .shown = "z<a>  <v> <n> z"},
              {.fact = "ExtraTokens",
               .config =
                   R"({"extra_special_tokens": {"z_token": "<n>", "image_token": {"__type": "AddedToken", "content": "<v>", "rstrip": true, "normalized": false}}})",
               .tokens = "z|<a>| |<s>| |<v>|<n>| |z",
               .shown = "z<a>   z",
               .more = "<n>"},
              {.fact = "ExtraTokensInTheOrderOfTheFile",
               .config =
                   R"({"extra_special_tokens": {"z_token": "<m>", "b_token": "<n>"}})",
               .tokens = "z|<a>| |<s>| |<|v|>| |<n>| |z",
               .shown = "z<a>  <v>  z",
               .more = "<m> <n>"},
              {.fact = "ExtraTokenInPlaceOfBos",
               .config =
                   R"({"bos_token": "<w>", "extra_special_tokens": {"bos_token": "<v>"}})",
               .tokens = "z|<a>| |<s>| |<v>| |<|n|>| |z",
               .shown = "z<a>   <n> z",
               .bos = "<v>"},
              {.fact = "NamesInTheMap",
               .map = R"({"bos_token": "<v>"})",
               .tokens = "z|<a>| |<s>| |<v>| |<|n|>| |z",
               .shown = "z<a>   <n> z",
               .bos = "<v>"},
              {.fact = "ObjectsInTheMap",
               .config = R"({"bos_token": "<w>"})",
               .map =
                   R"({"bos_token": {"content": "<v>", "rstrip": true, "normalized": false}})",
               .tokens = "z|<a>| |<s>| |<v>|<|n|>| |z",
               .shown = "z<a>  <n> z",
               .bos = "<v>"},
              {.fact = "NullInTheMap",
               .config = R"({"bos_token": "<v>"})",
               .map = R"({"bos_token": null})",
               .tokens = "z|<a>| |<s>| |<|v|>| |<|n|>| |z",
               .shown = "z<a>  <v> <n> z"},
              {.fact = "ListsInBoth",
               .config = R"({"additional_special_tokens": ["<w>"]})",
               .map =
                   R"({"additional_special_tokens": ["<v>", {"content": "<n>", "rstrip": true, "normalized": false}]})",
               .tokens = "z|<a>| |<s>| |<v>| |<n>|z",
               .shown = "z<a>   z",
               .more = "<n>"},
              {.fact = "TheMapBesideADecoder",
               .config = R"({"added_tokens_decoder": {}})",
               .map = R"({"bos_token": "<v>"})",
               .tokens = "z|<a>| |<s>| |<|v|>| |<|n|>| |z",
               .shown = "z<a>  <v> <n> z"},
              {.fact = "OtherKeysOfTheMap",
               .map = R"({"image_token": "<v>"})",
               .tokens = "z|<a>| |<s>| |<|v|>| |<|n|>| |z",
               .shown = "z<a>  <v> <n> z"},
              {.fact = "AddedTokensJson",
               .config = R"({"bos_token": "<n>"})",
               .added = R"({"<v>": 96, "<n>": 100})",
               .tokens = "z|<a>| |<s>| |<v>| |<n>| |z",
               .shown = "z<a>  <v>  z",
               .more = "<n>",
               .bos = "<n>"},
              {.fact = "AddedTokensJsonBesideADecoder",
               .config = R"({"added_tokens_decoder": {}})",
               .added = R"({"<v>": 96, "<n>": 100})",
               .tokens = "z|<a>| |<s>| |<|v|>| |<|n|>| |z",
               .shown = "z<a>  <v> <n> z"},
              {.fact = "LlamaDefaults",
               .tokenizer_class = "LlamaTokenizer",
               .tokens = "<s>|z|<a>| |<s>| |<|v|>| |<|n|>| |z",
               .shown = "z<a>  <v> <n> z",
               .more = "</s> <unk>",
               .bos = "<s>",
               .eos = "</s>"},
              {.fact = "LlamaWithoutBosWithEos",
               .tokenizer_class = "LlamaTokenizerFast",
               .config =
                   R"({"add_bos_token": false, "add_eos_token": true, "eos_token": "<v>"})",
               .file =
                   R"({"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [99], "tokens": ["<s>"]}}}})",
               .tokens = "z|<a>| |<s>| |<v>| |<|n|>| |z|<v>",
               .shown = "z<a>   <n> z",
               .more = "<unk>",
               .bos = "<s>",
               .eos = "<v>"},
              {.fact = "FastKeepsTheFilesTemplate",
               .config = R"({"add_bos_token": false})",
               .file =
                   R"({"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [99], "tokens": ["<s>"]}}}})",
               .tokens = "<s>|z|<a>| |<s>| |<|v|>| |<|n|>| |z",
               .shown = "z<a>  <v> <n> z"},
              {.fact = "NeoxRemovesTheTemplate",
               .tokenizer_class = "GPTNeoXTokenizer",
               .config = R"({"eos_token": "<v>"})",
               .file =
                   R"({"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [99], "tokens": ["<s>"]}}}})",
               .tokens = "z|<a>| |<s>| |<v>| |<|n|>| |z",
               .shown = "z<a>   <n> z",
               .more = "<|endoftext|>",
               .bos = "<|endoftext|>",
               .eos = "<v>"},
              {.fact = "Qwen2NamesHaveNoFlags",
               .tokenizer_class = "Qwen2Tokenizer",
               .config =
                   R"({"eos_token": "<a>", "unk_token": null, "pad_token": null, "added_tokens_decoder": {}})",
               .file =
                   R"({"added_tokens": [{"id": 98, "content": "<a>", "lstrip": false, "rstrip": true, "normalized": false, "single_word": false, "special": false}]})",
               .tokens = "z|<a>| |<|s|>| |<|v|>| |<|n|>| |z",
               .shown = "z <s> <v> <n> z",
               .eos = "<a>"},
              {.fact = "GemmaDefaults",
               .tokenizer_class = "GemmaTokenizer",
               .tokens = "<bos>|z|<a>| |<s>| |<|v|>| |<|n|>| |z",
               .shown = "z<a>  <v> <n> z",
               .more = "<bos> <eos> <unk> <pad>",
               .bos = "<bos>",
               .eos = "<eos>"},
              {.fact = "PrefixSpaceOfTheFile",
               .file =
                   R"({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": false}})",
               .tokens = "z|<a>|Ġ|<s>|Ġ|<|v|>|Ġ|<|n|>|Ġ|z",
               .shown = "z<a>ĠĠ<v>Ġ<n>Ġz"},
              {.fact = "PrefixSpaceOfTheConfig",
               .config = R"({"add_prefix_space": true})",
               .file =
                   R"({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}})",
               .tokens = "Ġ|z|<a>|Ġ|<s>|Ġ|<|v|>|Ġ|<|n|>|Ġ|z",
               .shown = "Ġz<a>ĠĠ<v>Ġ<n>Ġz"},
              {.fact = "LlamaKeepsThePrefixSpace",
               .tokenizer_class = "LlamaTokenizer",
               .config = R"({"unk_token": null, "eos_token": null})",
               .file =
                   R"({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": false}})",
               .tokens = "<s>|Ġ|z|<a>|Ġ|<s>|Ġ|<|v|>|Ġ|<|n|>|Ġ|z",
               .shown = "Ġz<a>ĠĠ<v>Ġ<n>Ġz",
               .bos = "<s>"},
              {.fact = "PrefixSpaceInASequenceStays",
               .config = R"({"add_prefix_space": false})",
               .file =
                   R"({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": false}]}})",
               .tokens = "Ġ|z|<a>|Ġ|<s>|Ġ|<|v|>|Ġ|<|n|>|Ġ|z",
               .shown = "Ġz<a>ĠĠ<v>Ġ<n>Ġz"},
              {.fact = "PrefixSpaceInASequenceOfBloom",
               .tokenizer_class = "BloomTokenizerFast",
               .config = R"({"add_prefix_space": true})",
               .file =
                   R"({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]}})",
               .tokens = "Ġ|z|<a>|Ġ|<s>|Ġ|<|v|>|Ġ|<|n|>|Ġ|z",
               .shown = "Ġz<a>ĠĠ<v>Ġ<n>Ġz",
               .more = "</s> <unk> <pad>",
               .bos = "<s>",
               .eos = "</s>"},
              {.fact = "PrefixSpaceInASequenceOfCohere",
               .tokenizer_class = "CohereTokenizerFast",
               .config =
                   R"({"add_prefix_space": true, "add_bos_token": false})",
               .file =
                   R"({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]}})",
               .tokens = "Ġ|z|<a>|Ġ|<s>|Ġ|<|v|>|Ġ|<|n|>|Ġ|z",
               .shown = "Ġz<a>ĠĠ<v>Ġ<n>Ġz",
               .more = "<BOS_TOKEN> <|END_OF_TURN_TOKEN|> <UNK>",
               .bos = "<BOS_TOKEN>",
               .eos = "<|END_OF_TURN_TOKEN|>"},
              {.fact = "CodeLlamaHasNoPrefixSpaceAndFourMoreTokens",
               .tokenizer_class = "CodeLlamaTokenizer",
               .config = R"({"unk_token": null, "eos_token": null})",
               .file =
                   R"({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": false}})",
               .tokens = "<s>|z|<a>|Ġ|<s>|Ġ|<|v|>|Ġ|<|n|>|Ġ|z",
               .shown = "z<a>ĠĠ<v>Ġ<n>Ġz",
               .more = "▁<PRE> ▁<MID> ▁<SUF> ▁<EOT>",
               .bos = "<s>"},
              {.fact = "EmptyTokensAreNone",
               .config =
                   R"({"added_tokens_decoder": {"100": {"content": "", "normalized": false}}, "pad_token": "<n>"})",
               .file =
                   R"({"added_tokens": [{"id": 98, "content": "<a>", "normalized": false}, {"id": 99, "content": "<s>", "special": true, "normalized": false}, {"id": 100, "content": "", "special": true}]})",
               .tokens = "z|<a>| |<s>| |<|v|>| |<n>| |z",
               .shown = "z<a>  <v>  z",
               .more = "<n>"},
              {.fact = "FieldsReplaceTheFourTokensOfCodeLlama",
               .tokenizer_class = "CodeLlamaTokenizer",
               .config =
                   R"({"unk_token": null, "eos_token": null, "suffix_token": null, "eot_token": "<v>", "additional_special_tokens": ["<n>"]})",
               .tokens = "<s>|z|<a>| |<s>| |<v>| |<n>| |z",
               .shown = "z<a>    z",
               .more = "<n> ▁<PRE> ▁<MID>",
               .bos = "<s>"},
          };
  return *rows;
}

class TokenizerConfigTest : public testing::TestWithParam<Row> {};

TEST_P(TokenizerConfigTest, TokensAndTextsEqualThoseOfAutoTokenizer) {
  const Row& row = GetParam();
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto tokenizer, LoadRow(row));
  KVASIR_ASSERT_OK_AND_ASSIGN(const Ids ids, tokenizer->Encode(kText));
  EXPECT_EQ(Joined(*tokenizer, ids, "|"), row.tokens);
  EXPECT_EQ(tokenizer->Decode(ids, /*skip_special=*/true), row.shown);
  Ids more;
  for (int32_t id = 100; id < tokenizer->vocab_size(); ++id) more.push_back(id);
  EXPECT_EQ(Joined(*tokenizer, more, " "), row.more);
  EXPECT_EQ(tokenizer->IdToToken(tokenizer->bos_id().value_or(-1)), row.bos);
  EXPECT_EQ(Joined(*tokenizer, tokenizer->eos_ids(), " "), row.eos);
}

INSTANTIATE_TEST_SUITE_P(All, TokenizerConfigTest, testing::ValuesIn(Rows()),
                         [](const auto& row) { return row.param.fact; });

TEST(TokenizerConfigErrorTest, ErrorsNameTheFileTheFieldAndTheValue) {
  struct Bad {
    Row row;
    const char* words;
  };
  const std::vector<Bad> rows = {
      {{.config = R"({"bos_token": 7})"},
       "tokenizer_config.json beside tokenizer.json: config.bos_token is 7"},
      {{.config = R"({"eos_token": false})"}, "config.eos_token is false"},
      {{.config = R"({"pad_token": {"lstrip": true}})"},
       "config.pad_token.content is missing"},
      {{.config = R"({"pad_token": {"content": "<p>", "lstrip": 1}})"},
       "config.pad_token.lstrip is 1, want true or false"},
      {{.config = R"({"additional_special_tokens": "<p>"})"},
       "config.additional_special_tokens is \"<p>\", want an array"},
      {{.config = R"({"additional_special_tokens": ["<p>", 3]})"},
       "config.additional_special_tokens[1] is 3"},
      {{.config = R"({"extra_special_tokens": {"image_token": 3}})"},
       "config.extra_special_tokens.image_token is 3"},
      {{.config = R"({"extra_special_tokens": 3})"},
       "config.extra_special_tokens is 3, want an object"},
      {{.config = R"({"added_tokens_decoder": []})"},
       "config.added_tokens_decoder is an array of 0, want an object"},
      {{.config = R"({"added_tokens_decoder": {"x": {"content": "<p>"}}})"},
       "config.added_tokens_decoder has the key \"x\", want an id"},
      {{.config = R"({"added_tokens_decoder": {"5": "<p>"}})"},
       "config.added_tokens_decoder.5 is \"<p>\", want an object"},
      {{.config = R"({"added_tokens_decoder": {"5": {"special": true}}})"},
       "config.added_tokens_decoder.5.content is missing"},
      {{.map = R"({"bos_token": 7})"},
       "special_tokens_map.json beside tokenizer.json: map.bos_token is 7"},
      {{.map = "[]"}, "special_tokens_map.json beside tokenizer.json: map is"},
      {{.added = R"({"<p>": "<q>"})"},
       "added_tokens.json beside tokenizer.json: tokens[\"<p>\"] is \"<q>\""},
      {{.added = R"({"<p>": 7, "<q>": 7})"},
       "tokens[\"<q>\"] is 7, but that is also the id of [\"<p>\"]"},
      {{.tokenizer_class = "LlamaTokenizer",
        .config = R"({"bos_token": null})"},
       "config.add_bos_token is true for a LlamaTokenizer, but bos_token names "
       "no token"},
      // The vocabulary has two tokens, so the next id would be 2, which "a"
      // already has.
      {{.config = R"({"pad_token": "<p>"})",
        .file = R"({"added_tokens": [], "model": {"merges": [],
                    "vocab": {"a": 2, "b": 3}}})"},
       "tokenizer_config.json beside tokenizer.json: config adds the token "
       "\"<p>\", whose id would be 2, the id of \"a\""},
  };
  for (const Bad& bad : rows) {
    EXPECT_THAT(LoadRow(bad.row),
                StatusIs(Code::kInvalidArgument, HasSubstr(bad.words)))
        << bad.words;
  }
}

TEST(TokenizerConfigHashTest,
     TheHashChangesIfTheConfigurationChangesIdsOrTexts) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto plain,
                              Tokenizer::FromJson(SmallFile().dump()));
  KVASIR_ASSERT_OK_AND_ASSIGN(const Ids ids, plain->Encode(kText));
  for (const Row& row : Rows()) {
    if (std::string_view(row.file) != "{}") continue;
    KVASIR_ASSERT_OK_AND_ASSIGN(const auto tokenizer, LoadRow(row));
    KVASIR_ASSERT_OK_AND_ASSIGN(const Ids got, tokenizer->Encode(kText));
    if (got != ids ||
        tokenizer->Decode(ids, true) != plain->Decode(ids, true)) {
      EXPECT_NE(tokenizer->hash(), plain->hash()) << row.fact;
    }
  }
}

TEST(TokenizerConfigHashTest, AConfigurationThatChangesNothingKeepsTheHash) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto plain,
                              Tokenizer::FromJson(SmallFile().dump()));
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const auto tokenizer,
      LoadRow({.config = R"({"bos_token": "<s>", "eos_token": null})"}));
  EXPECT_EQ(tokenizer->hash(), plain->hash());
}

// A file with the tokens "a" to "d" (ids 0 to 3), "</s>" (4), "<|endoftext|>"
// (5) and "<E>" (6).
constexpr char kThreeAddedTokens[] =
    R"({"added_tokens":[{"id":4,"content":"</s>","special":true},
        {"id":5,"content":"<|endoftext|>","special":true},
        {"id":6,"content":"<E>","special":true}],
        "model":{"type":"BPE","vocab":{"a":0,"b":1,"c":2,"d":3},"merges":[]}})";

struct EosCase {
  const char* config;
  const char* map;  // an empty text: no such file
  std::vector<int32_t> eos;
};

// The expected ids are those of AutoTokenizer in transformers 4.57 and 5.24.
TEST(TokenizerConfigTest, TheEosTokenIsReadFromEachPlaceThatMayNameIt) {
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
           {R"({"tokenizer_class":"CodeLlamaTokenizer"})", "", {4}},
           // Adds three tokens that the vocabulary lacks.
           {R"({"tokenizer_class":"CohereTokenizer"})", "", {8}}}) {
    const base::TempFolder folder;
    folder.Write("tokenizer.json", kThreeAddedTokens);
    if (*one.config != '\0') folder.Write("tokenizer_config.json", one.config);
    if (*one.map != '\0') folder.Write("special_tokens_map.json", one.map);
    const auto tokenizer = Tokenizer::Load(folder.path());
    KVASIR_ASSERT_OK(tokenizer);
    EXPECT_EQ((*tokenizer)->eos_ids(), one.eos) << one.config << one.map;
  }
}

TEST(TokenizerConfigTest, TheErrorForAnInvalidSpecialTokensMapNamesTheFile) {
  for (const char* map : {"[]", "{", R"({"eos_token":7})"}) {
    const base::TempFolder folder;
    folder.Write("tokenizer.json", kThreeAddedTokens);
    folder.Write("special_tokens_map.json", map);
    EXPECT_THAT(Tokenizer::Load(folder.path()),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr(folder.path()), HasSubstr("_"))))
        << map;
  }
}

}  // namespace
}  // namespace kvasir::model
