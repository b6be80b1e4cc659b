// Tests unusual forms of tokenizer.json that have only one meaning. The
// expected ids and texts are those of Hugging Face's tokenizers 0.22.2.
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "model/tokenizer/detokenizer.h"
#include "model/tokenizer/tokenizer.h"
#include "nlohmann/json.hpp"

namespace kvasir::model {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using Code = absl::StatusCode;
using Ids = std::vector<int32_t>;

// Returns a file with the vocabulary {"a": 0, "b": 1, "u": 2} and the
// tokens of `more`.
json FileWith(const json& more, const json& model = json::object()) {
  json file = {
      {"decoder", {{"type", "Fuse"}}},
      {"model",
       {{"vocab", {{"a", 0}, {"b", 1}, {"u", 2}}}, {"merges", json::array()}}}};
  file["model"]["vocab"].update(more);
  file["model"].update(model);
  return file;
}

std::unique_ptr<Tokenizer> Load(const json& file) {
  auto tokenizer = Tokenizer::FromJson(file.dump());
  KVASIR_EXPECT_OK(tokenizer);
  return *std::move(tokenizer);
}

Ids IdsOf(const json& file, const std::string& text) {
  auto ids = Load(file)->Encode(text);
  KVASIR_EXPECT_OK(ids);
  return *std::move(ids);
}

std::string Streamed(const Tokenizer& tokenizer, const Ids& ids) {
  IncrementalDetokenizer stream(tokenizer, /*skip_special=*/true);
  std::string text;
  for (const int32_t id : ids) text += stream.Push(id);
  return text + stream.Finish();
}

TEST(TokenizerFormsTest, TheEmptyTokenIsDecodedToNoText) {
  json file = FileWith({{"", 3}});
  const auto fused = Load(file);
  EXPECT_EQ(fused->Decode(Ids{0, 3, 1}, true), "ab");
  EXPECT_EQ(fused->vocab_size(), 4);
  EXPECT_EQ(fused->TokenToId(""), std::nullopt);
  EXPECT_EQ(IdsOf(file, "ab"), (Ids{0, 1}));
  // Without a decoder, tokens are joined by spaces.
  file.erase("decoder");
  const auto joined = Load(file);
  EXPECT_EQ(joined->Decode(Ids{0, 3, 1}, true), "a  b");
  EXPECT_EQ(Streamed(*joined, Ids{0, 3, 1}), "a  b");
  // An added token cannot have the same id.
  file["added_tokens"] = {{{"id", 3}, {"content", "<x>"}}};
  EXPECT_THAT(Tokenizer::FromJson(file.dump()),
              base::StatusIs(Code::kInvalidArgument,
                             HasSubstr("id 3, but that is the id of \"\"")));
}

TEST(TokenizerFormsTest, OnlyTextsThatNeedTheMissingUnkTokenAreRefused) {
  json file = FileWith(json::object(), {{"unk_token", "<unk>"}});
  file["added_tokens"] = {{{"id", 3}, {"content", "<unk>"}}};
  const auto tokenizer = Load(file);
  KVASIR_ASSERT_OK_AND_ASSIGN(const Ids ids, tokenizer->Encode("ab"));
  EXPECT_EQ(ids, (Ids{0, 1}));
  EXPECT_THAT(
      tokenizer->Encode("ab\u00e9xb"),
      base::StatusIs(Code::kInvalidArgument,
                     HasSubstr("no token covers the character \"\u00e9\", and "
                               "the tokenizer's unk_token \"<unk>\" is not in "
                               "its vocabulary")));
}

TEST(TokenizerFormsTest, CharactersWithoutAllTheirByteTokensAreUnknown) {
  const json bytes = {{"<0xC3>", 3}, {"<0xA9>", 4}};
  const std::vector<std::string> texts = {"a\u00e9b", "a\u00e8b",
                                          "a\u00e8\u00e8\u00e9\u00e8b"};
  const std::vector<std::pair<json, std::vector<Ids>>> rows = {
      {json::object(), {{0, 3, 4, 1}, {0, 1}, {0, 3, 4, 1}}},
      {{{"unk_token", "u"}}, {{0, 3, 4, 1}, {0, 2, 1}, {0, 2, 3, 4, 2, 2, 1}}},
      {{{"unk_token", "u"}, {"fuse_unk", true}},
       {{0, 3, 4, 1}, {0, 2, 1}, {0, 3, 4, 2, 1}}},
  };
  for (const auto& [options, want] : rows) {
    json model = options;
    model["byte_fallback"] = true;
    for (size_t i = 0; i < texts.size(); ++i) {
      EXPECT_EQ(IdsOf(FileWith(bytes, model), texts[i]), want[i])
          << model << texts[i];
    }
  }
  const auto strict =
      Load(FileWith(bytes, {{"byte_fallback", true}, {"unk_token", "<unk>"}}));
  KVASIR_EXPECT_OK(strict->Encode(texts[0]));
  EXPECT_THAT(strict->Encode(texts[1]),
              base::StatusIs(Code::kInvalidArgument, HasSubstr("<unk>")));
}

// Characters that no token covers are dropped, so one id may stand for many.
TEST(TokenizerFormsTest, ALongTextMayHaveFewIdsIfTheByteFallbackIsIncomplete) {
  const auto tokenizer =
      Load(FileWith({{"<0xC3>", 3}}, {{"byte_fallback", true}}));
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const Ids ids,
      tokenizer->Encode(std::string(1 << 16, 'z') + "a", {.max_ids = 1}));
  EXPECT_EQ(ids, (Ids{0}));
}

TEST(TokenizerFormsTest, AVersionLineInTheListOfMergesIsNotReadAsAMerge) {
  for (const json& merges :
       {json{"#version: 0.2", "a b"}, json{"a b", "#version: 0.2"},
        json{"#version", "a b"}}) {
    EXPECT_EQ(IdsOf(FileWith({{"ab", 3}}, {{"merges", merges}}), "ab"),
              (Ids{3}));
  }
  json file = FileWith({{"ab", 3}}, {{"merges", {"#version: 0.2", "a z"}}});
  EXPECT_THAT(
      Tokenizer::FromJson(file.dump()),
      base::StatusIs(Code::kInvalidArgument, HasSubstr("merges[1] merges")));
}

TEST(TokenizerFormsTest, RobertaAndBertProcessingPutTheTextBetweenTwoTokens) {
  json file = FileWith({{"<s>", 3}, {"</s>", 4}});
  for (const char* type : {"RobertaProcessing", "BertProcessing"}) {
    file["post_processor"] = {{"type", type},
                              {"sep", {"</s>", 4}},
                              {"cls", {"<s>", 3}},
                              {"trim_offsets", true},
                              {"add_prefix_space", true}};
    EXPECT_EQ(IdsOf(file, "ab"), (Ids{3, 0, 1, 4}));
    file["post_processor"] = {
        {"type", "Sequence"},
        {"processors", {{{"type", "ByteLevel"}}, file["post_processor"]}}};
    EXPECT_EQ(IdsOf(file, "a"), (Ids{3, 0, 4}));
  }
}

TEST(TokenizerFormsTest, TheLastEntryForAnAddedTokenDeterminesItsFlags) {
  const auto entry = [](bool special, bool rstrip, bool normalized) {
    return json{{"id", 3},
                {"content", "<a>"},
                {"special", special},
                {"rstrip", rstrip},
                {"normalized", normalized}};
  };
  json file = FileWith({{" ", 4}});
  file["added_tokens"] = {entry(false, false, false),
                          entry(false, true, false)};
  EXPECT_EQ(IdsOf(file, "<a> b"), (Ids{3, 1}));
  // A token that was special in one entry stays special.
  for (const bool first : {true, false}) {
    file["added_tokens"] = {entry(first, false, false),
                            entry(!first, false, false)};
    EXPECT_EQ(Load(file)->Decode(Ids{3, 0}, true), "a");
  }
  // A token whose entries differ in "normalized" is searched in both forms.
  file["normalizer"] = {{"type", "Lowercase"}};
  file["added_tokens"] = {entry(false, false, true),
                          entry(false, false, false)};
  EXPECT_EQ(IdsOf(file, "<A><a>"), (Ids{3, 3}));
}

struct DecoderCase {
  json decoder;
  std::vector<std::string> texts;
};

// ChatGLM's decoder is ByteFallback, then Metaspace. A run of byte tokens is
// one token to the stages after it.
TEST(TokenizerFormsTest, DecodersMayFollowByteFallback) {
  json file = {{"model",
                {{"vocab",
                  {{"a", 0},
                   {"\u2581a", 1},
                   {"<0xE2>", 2},
                   {"<0x96>", 3},
                   {"<0x81>", 4},
                   {"<0x41>", 5},
                   {"\u2581", 6},
                   {"", 7}}},
                 {"merges", json::array()}}}};
  const std::vector<Ids> ids = {
      {1, 1},       {2, 3, 4, 2, 3, 4, 0}, {2, 3, 4, 5, 2, 3, 4, 1},
      {5, 2, 3, 4}, {0, 2, 3, 4},          {1, 5, 1},
      {5, 1},       {5, 5, 2, 3, 4, 1},    {7, 1, 1},
      {0, 7, 1}};
  const json fallback = {{"type", "ByteFallback"}};
  const json fuse = {{"type", "Fuse"}};
  const json strip = {
      {"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}};
  const auto metaspace = [](const char* scheme) {
    return json{{"type", "Metaspace"},
                {"replacement", "\u2581"},
                {"prepend_scheme", scheme}};
  };
  const auto replace = [](const char* from, const char* to) {
    return json{
        {"type", "Replace"}, {"pattern", {{"String", from}}}, {"content", to}};
  };
  const std::vector<DecoderCase> rows = {
      {{fallback, metaspace("always")},
       {"a a", "a", "A a", "A", "a ", "aA a", "A a", "AA a", " a a", "a a"}},
      {{fallback, metaspace("always"), fuse},
       {"a a", "a", "A a", "A", "a ", "aA a", "A a", "AA a", " a a", "a a"}},
      {{fallback, metaspace("never")},
       {" a a", "  a", " A  a", "A ", "a ", " aA a", "A a", "AA  a", " a a",
        "a a"}},
      {{fallback, replace("\u2581", " "), fuse, strip},
       {"a a", " a", "A  a", "A ", "a ", "aA a", "A a", "AA  a", "a a", "a a"}},
      {{fallback, replace("A", "\u2581"), metaspace("always")},
       {"a a", "a", " a", "", "a ", "a  a", " a", " a", " a a", "a a"}},
  };
  for (const DecoderCase& row : rows) {
    file["decoder"] = {{"type", "Sequence"}, {"decoders", row.decoder}};
    const auto tokenizer = Load(file);
    for (size_t i = 0; i < ids.size(); ++i) {
      EXPECT_EQ(tokenizer->Decode(ids[i], true), row.texts[i])
          << row.decoder << i;
      EXPECT_EQ(Streamed(*tokenizer, ids[i]), row.texts[i]) << row.decoder << i;
    }
  }
}

// These decoders need the whole run of byte tokens, so they cannot be streamed.
TEST(TokenizerFormsTest, DecodersThatNeedAWholeRunOfBytesAreRefused) {
  json file = FileWith(json::object());
  const json fallback = {{"type", "ByteFallback"}};
  const json metaspace = {{"type", "Metaspace"}, {"replacement", "\u2581"}};
  const json strip = {
      {"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}};
  for (const json& later : {strip,
                            json{{"type", "Replace"},
                                 {"pattern", {{"String", "ab"}}},
                                 {"content", " "}},
                            json{{"type", "Replace"},
                                 {"pattern", {{"Regex", "a"}}},
                                 {"content", " "}},
                            fallback}) {
    file["decoder"] = {{"type", "Sequence"},
                       {"decoders", {fallback, metaspace, later}}};
    EXPECT_THAT(
        Tokenizer::FromJson(file.dump()),
        base::StatusIs(Code::kUnimplemented,
                       HasSubstr("Fuse, ByteLevel, Metaspace and the Replace "
                                 "of one character after ByteFallback")));
  }
}

// Made by SentencePiece from the rules A>a, e U+0301>E!, U+FB01>fi, U+00AD>
// nothing, CR LF>LF, CR>space, U+2460>1, ab>Q, U+AC00>ga.
constexpr char kRules[] =
    "AAQAAAAwAAANDQAAAwAAgAEAAIAMAACAYg0AAAoAAIDMPAIACi0AAIENAAAHAACArRkAAJGI"
    "AgAAAACAoAUAAAUAAICwBAIAgA0AABEAAICsGAIAgQUAAA4AAIAXAAAAFgAAABkAAAAYAAAA"
    "GwAAABoAAAAdAAAAHAAAAB8AAAAeAAAAIQAAACAAAAAjAAAAIgAAACUAAAAkAAAAJwAAACYA"
    "AAApAAAAKAAAACsAAAAqAAAALQAAACwAAAAvAAAALgAAADEAAAAwAAAAMwAAADIAAAA1AAAA"
    "NAAAADcAAAA2AAAAOQAAADgAAAA7AAAAOgAAAD0AAAA8AAAAPwAAAD4AAABBAAAAQAAAAEMA"
    "AABCAAAARQAAAEQAAABHAAAARgAAAEkAAABIAAAASwAAAEoAAABNAAAAQSUBAE8AAABOAAAA"
    "UQAAAFAAAABTAAAAUgAAAFUAAABUAAAAVwAAAFYAAABZAAAAWAAAAFsAAABaAAAAXQAAAFwA"
    "AABfAAAAXgAAAGEAAABgAAAAYwAAAGIAAABlAAAAZAAAAGcAAABmAAAAaQAAAGWIAgBrAAAA"
    "agAAAG0AAABhKAAAbwAAAG4AAABxAAAAcAAAAHMAAAByAAAAdQAAAHQAAAB3AAAAdgAAAHkA"
    "AAB4AAAAewAAAHoAAAB9AAAAfAAAAH8AAAB+AAAAgQAAAIAAAACDAAAAggAAAIUAAACEAAAA"
    "hwAAAIYAAACJAAAAiAAAAIsAAACKAAAAjQAAAIwAAACPAAAAjgAAAJEAAACQAAAAkwAAAJIA"
    "AACVAAAAlAAAAJcAAACWAAAAmQAAAJgAAACbAAAAmgAAAJ0AAACcAAAAnwAAAJ4AAAChAAAA"
    "oAAAAKMAAACiAAAApQAAAKQAAACnAAAApgAAAKkAAACoAAAAqwAAAKoAAACtAAAArAAAAK8A"
    "AACuAAAAsQAAALAAAACzAAAAsgAAALUAAAC0AAAAtwAAALYAAAC5AAAAuAAAALsAAAC6AAAA"
    "vQAAALwAAAC/AAAAvgAAAMEAAADAAAAAwwAAAMIAAADFAAAAxAAAAMcAAADGAAAAyQAAAMgA"
    "AADLAAAAygAAAM0AAADMAAAAwqABAM4AAADRAAAA0AAAANMAAADSAAAA1QAAANQAAADXAAAA"
    "1gAAANkAAADYAAAA2wAAANoAAADdAAAA3AAAAN8AAADeAAAA4QAAAOAAAADjAAAA73ABAOUA"
    "AADkAAAA6hgBAOYAAADpAAAA6AAAAOsAAADqAAAA7QAAAOwAAADizAEA7gAAAPEAAADwAAAA"
    "8wAAAPIAAAD1AAAA9AAAAPcAAAD2AAAA+QAAAPgAAAD7AAAA+gAAAP0AAAD8AAAA/wAAAP4A"
    "AAAACgAgADEARSEAUQBhAGZpAGdhAA==";

json PrecompiledFile(const std::string& rules) {
  json file = FileWith({{"<0x00>", 3}}, {{"byte_fallback", true}});
  for (int byte = 0; byte < 256; ++byte) {
    char token[8];
    std::snprintf(token, sizeof(token), "<0x%02X>", byte);
    file["model"]["vocab"][token] = 3 + byte;
  }
  file["decoder"] = {
      {"type", "Sequence"},
      {"decoders", {{{"type", "ByteFallback"}}, {{"type", "Fuse"}}}}};
  file["normalizer"] = {{"type", "Precompiled"},
                        {"precompiled_charsmap", rules}};
  return file;
}

TEST(TokenizerFormsTest,
     ThePrependSchemeFirstAppliesToEveryPieceMadeFromTheFirstCharacter) {
  json file = json::parse(R"({
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
      {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated"},
      {"type": "Metaspace", "replacement": "_", "prepend_scheme": "first"}]},
    "model": {"type": "BPE", "merges": [], "vocab": {}}})");
  for (const char c : std::string("abehijxyz_")) {
    json& vocab = file["model"]["vocab"];
    vocab[std::string(1, c)] = vocab.size();
  }
  const json prepend = {{"type", "Prepend"}, {"prepend", "xy"}};
  const json strip = {{"type", "Strip"}};
  const auto replace = [](const char* from, const char* to) {
    return json{
        {"type", "Replace"}, {"pattern", {{"Regex", from}}}, {"content", to}};
  };
  struct Row {
    std::vector<json> normalizers;
    const char* text;
    const char* tokens;
  };
  for (const Row& row : {
           Row{{prepend}, "ab", "_x_y_ab"},
           Row{{prepend, strip}, "ab", "_x_y_ab"},
           Row{{strip, prepend}, " ab", "xyab"},
           Row{{strip}, "  ab", "ab"},
           Row{{json{{"type", "NFD"}}}, "\u00e9ab", "_e_ab"},
           Row{{json{{"type", "NFKC"}}}, "\u2488b", "__b"},
           Row{{json{{"type", "NFKC"}}}, "\u0133ab", "_i_jab"},
           Row{{json{{"type", "Lowercase"}}}, "\u0130AB", "_i_ab"},
           Row{{replace("a", "zy")}, "aab", "_z_yzyb"},
           Row{{replace("aa", "zy")}, "aab", "zyb"},
           Row{{replace("b", "zy")}, "ab", "_azy"},
           Row{{replace("a", "")}, "aab", "b"},
           Row{{replace("^", "z")}, "ab", "_z_ab"},
       }) {
    file["normalizer"] = {{"type", "Sequence"},
                          {"normalizers", json(row.normalizers)}};
    const auto tokenizer = Load(file);
    KVASIR_ASSERT_OK_AND_ASSIGN(const Ids ids, tokenizer->Encode(row.text));
    std::string tokens;
    for (const int32_t id : ids) tokens += tokenizer->IdToToken(id);
    EXPECT_EQ(tokens, row.tokens) << json(row.normalizers).dump() << row.text;
  }
}

// A grapheme of less than 6 bytes is replaced as a whole, even if only its
// first character has a rule. "ab" is two graphemes.
TEST(TokenizerFormsTest,
     PrecompiledRulesReplaceWholeGraphemesBeforeCharacters) {
  const auto tokenizer = Load(PrecompiledFile(kRules));
  const std::string acute = "\u0301";
  const std::vector<std::pair<std::string, std::string>> rows = {
      {"Abc", "abc"},
      {"e" + acute + "x", "E!x"},
      {"\u00e9", "\u00e9"},
      {"e" + acute + acute, "E!"},
      {"\ufb01nd", "find"},
      {"a\u00adb", "ab"},
      {"x\r\ny\rz", "x y z"},
      {"ab\u2460", "ab1"},
      {"\uac00" + acute + acute + "A", "ga" + acute + acute + "a"},
      {"\uac00"
       "A",
       "gaa"},
      {"A" + acute, "a"},
      {"e" + acute + "\u0327" + acute, "e" + acute + "\u0327" + acute},
      {std::string("\0A", 2), std::string("\0a", 2)},
      {"", ""},
  };
  for (const auto& [text, want] : rows) {
    KVASIR_ASSERT_OK_AND_ASSIGN(const Ids ids, tokenizer->Encode(text));
    EXPECT_EQ(tokenizer->Decode(ids, true), want) << text;
  }
}

// Returns the content of a "precompiled_charsmap" with the trie `units` and the
// replacement texts `texts`.
std::string Rules(const std::vector<uint32_t>& units,
                  const std::string& texts) {
  std::string bytes;
  const auto put = [&](uint32_t value) {
    for (int i = 0; i < 4; ++i) {
      bytes.push_back(static_cast<char>(value >> (8 * i)));
    }
  };
  put(static_cast<uint32_t>(4 * units.size()));
  for (const uint32_t unit : units) put(unit);
  return absl::Base64Escape(bytes + texts);
}

TEST(TokenizerFormsTest, BrokenPrecompiledRulesAreRefused) {
  const std::vector<std::pair<json, const char*>> rows = {
      {nullptr, "normalizer.precompiled_charsmap is missing"},
      {7, "precompiled_charsmap is 7, want a string"},
      {"", "the rules have 0 bytes"},
      {"!", "precompiled_charsmap is \"!\", want base64"},
      {"AAAAAA==", "the rules have 4 bytes and a trie of 0"},
      {"AwAAAAAAAAA=", "a trie of 3"},
      {"CAAAAAAAAAA=", "the rules have 8 bytes and a trie of 8"},
      {Rules({0}, "\xFF"), "the texts of the rules are not UTF-8"},
  };
  for (const auto& [rules, words] : rows) {
    json file = PrecompiledFile("");
    file["normalizer"]["precompiled_charsmap"] = rules;
    EXPECT_THAT(Tokenizer::FromJson(file.dump()),
                base::StatusIs(Code::kInvalidArgument, HasSubstr(words)));
  }
}

// Returns a trie with the key "a" only. A child is at its parent's distance XOR
// the byte. The units are the root, the child for "a" (0x61), and its value.
std::vector<uint32_t> TrieOfA(uint32_t value) {
  std::vector<uint32_t> units(0x80, 0);
  units[0] = 0;
  units['a'] = 1U << 10 | 1U << 8 | 'a';
  units['a' ^ 1] = value;
  return units;
}

TEST(TokenizerFormsTest, OnlyInputsThatNeedARuleWithAnInvalidOffsetAreRefused) {
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const Ids ids,
      Load(PrecompiledFile(Rules(TrieOfA(0), "b")))->Encode("a"));
  EXPECT_EQ(ids, (Ids{1}));
  for (const uint32_t value : {1U, 4U, 0x7FFFFFFFU}) {
    const auto tokenizer =
        Load(PrecompiledFile(Rules(TrieOfA(value), "\u00e9")));
    KVASIR_EXPECT_OK(tokenizer->Encode("b"));
    EXPECT_THAT(tokenizer->Encode("a"),
                base::StatusIs(Code::kInvalidArgument,
                               HasSubstr("a rule of the tokenizer's "
                                         "precompiled_charsmap points to")));
  }
  // A child outside the trie does not match.
  std::vector<uint32_t> units = TrieOfA(0);
  units['a'] = 0x3FFFFFU << 10 | 1U << 9 | 1U << 8 | 'a';
  EXPECT_EQ(IdsOf(PrecompiledFile(Rules(units, "b")), "a"), (Ids{0}));
  units = {0x3FFFFFU << 10};
  EXPECT_EQ(IdsOf(PrecompiledFile(Rules(units, "b")), "a"), (Ids{0}));
}

TEST(TokenizerFormsTest, PrecompiledRulesThatMakeATextTooLongAreRefused) {
  const auto tokenizer =
      Load(PrecompiledFile(Rules(TrieOfA(0), std::string(1 << 20, 'b'))));
  EXPECT_THAT(
      tokenizer->Encode(std::string(100, 'a')),
      base::StatusIs(Code::kInvalidArgument,
                     HasSubstr("precompiled_charsmap makes more than")));
}

}  // namespace
}  // namespace kvasir::model
