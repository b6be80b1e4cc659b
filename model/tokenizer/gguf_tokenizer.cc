#include "model/tokenizer/gguf_tokenizer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "base/string_view.h"
#include "model/tokenizer/utf8.h"
#include "nlohmann/json.hpp"

namespace kvasir::model {
namespace {

using base::AbslView;
using nlohmann::json;

constexpr char kTokensKey[] = "tokenizer.ggml.tokens";
constexpr char kTypesKey[] = "tokenizer.ggml.token_type";
constexpr char kScoresKey[] = "tokenizer.ggml.scores";
constexpr char kMergesKey[] = "tokenizer.ggml.merges";
constexpr char kModelKey[] = "tokenizer.ggml.model";
constexpr char kSplitKey[] = "tokenizer.ggml.pre";
// SentencePiece replaces each space by this character, U+2581.
constexpr char kSpaceMark[] = "\xe2\x96\x81";

// The enumerators have the numbers of the file format.
enum GgufTokenType : int64_t {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,
  kUnused = 5,
  kByte = 6,
};

// How a byte-level tokenizer splits a text before the merges.
struct SplitRow {
  std::string_view name;  // the value of tokenizer.ggml.pre
  // The components of the pre-tokenizer before the byte level, as JSON.
  std::string_view components;
  // True: the ByteLevel component itself splits by GPT-2's pattern.
  bool words = false;
  bool nfc = false;  // the text is normalized first
  bool ignore_merges = false;
  bool adds_bos = false;  // the default if the file does not say it
};

constexpr std::string_view kDigits =
    R"({"type":"Digits","individual_digits":true})";
// The patterns are those in the tokenizer.json files of the models after which
// the rows are named.
constexpr std::string_view kLlama3 =
    R"({"type":"Split","behavior":"Isolated","invert":false,"pattern":{"Regex":)"
    R"("(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|)"
    R"( ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"}})";
constexpr std::string_view kQwen2 =
    R"({"type":"Split","behavior":"Isolated","invert":false,"pattern":{"Regex":)"
    R"("(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}|)"
    R"( ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"}})";
constexpr std::string_view kTekken =
    R"({"type":"Split","behavior":"Isolated","invert":false,"pattern":{"Regex":)"
    R"("[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*)"
    R"([\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+|[^\\r\\n\\p{L}\\p{N}]?)"
    R"([\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*|)"
    R"(\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"}})";
constexpr std::string_view kGpt4o =
    R"({"type":"Split","behavior":"Isolated","invert":false,"pattern":{"Regex":)"
    R"("[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*)"
    R"([\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
    R"([^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+)"
    R"([\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
    R"(\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|)"
    R"(\\s+(?!\\S)|\\s+"}})";
// The pattern that llama.cpp uses if it does not know the value of
// tokenizer.ggml.pre. It splits at punctuation, then into words, then at runs
// of digits, then into groups of three digits.
constexpr std::string_view kDefault =
    R"({"type":"Split","behavior":"Isolated","invert":false,"pattern":{"Regex":)"
    R"("[\\p{P}\\$\\+<=>\\^~\\|]+"}},)"
    R"({"type":"Split","behavior":"Isolated","invert":false,"pattern":{"Regex":)"
    R"("'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|)"
    R"x(\\s+(?!\\S)"}},)x"
    R"({"type":"Split","behavior":"Isolated","invert":false,"pattern":{"Regex":)"
    R"("\\p{N}+"}},)"
    R"({"type":"Split","behavior":"Isolated","invert":false,"pattern":{"Regex":)"
    R"("[0-9][0-9][0-9]"}})";

constexpr std::array<SplitRow, 17> kSplits = {{
    {.name = "default", .components = kDefault},
    {.name = "gpt-2", .words = true},
    {.name = "phi-2", .words = true},
    // Both have the tokenizer of GPT-NeoX.
    {.name = "olmo", .words = true, .nfc = true},
    {.name = "mpt", .words = true, .nfc = true},
    {.name = "smollm", .components = kDigits, .words = true},
    {.name = "starcoder", .components = kDigits, .words = true},
    {.name = "codeshell", .components = kDigits, .words = true},
    {.name = "llama-bpe",
     .components = kLlama3,
     .ignore_merges = true,
     .adds_bos = true},
    {.name = "llama3",
     .components = kLlama3,
     .ignore_merges = true,
     .adds_bos = true},
    {.name = "llama-v3",
     .components = kLlama3,
     .ignore_merges = true,
     .adds_bos = true},
    {.name = "dbrx", .components = kLlama3},
    {.name = "smaug-bpe", .components = kLlama3},
    {.name = "qwen2", .components = kQwen2, .nfc = true},
    {.name = "deepseek-r1-qwen", .components = kQwen2, .nfc = true},
    {.name = "tekken",
     .components = kTekken,
     .ignore_merges = true,
     .adds_bos = true},
    {.name = "gpt-4o", .components = kGpt4o},
}};

// Appends a JSON string. `text` must be valid UTF-8.
void AppendJsonString(std::string_view text, std::string* out) {
  out->push_back('"');
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out->push_back('\\');
      out->push_back(c);
    } else if (static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppendFormat(out, "\\u%04x", c);
    } else {
      out->push_back(c);
    }
  }
  out->push_back('"');
}

// The number of characters of a valid UTF-8 text.
size_t CountChars(std::string_view text) {
  return static_cast<size_t>(std::count_if(
      text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

class GgufTokenizerWriter {
 public:
  explicit GgufTokenizerWriter(const GgufHeader& header) : header_(header) {}

  absl::StatusOr<GgufTokenizer> Run() {
    KVASIR_ASSIGN_OR_RETURN(const auto model, header_.String(kModelKey));
    if (!model.has_value() || *model == "none" || *model == "no_vocab") {
      return absl::NotFoundError(absl::StrFormat(
          "the model has no tokenizer: in %s, %s is missing or says so",
          header_.where(), kModelKey));
    }
    KVASIR_ASSIGN_OR_RETURN(const auto architecture,
                            header_.String("general.architecture"));
    is_phi3_ = architecture == "phi3";
    is_sentence_piece_ = *model == "llama";
    if (!is_sentence_piece_ && *model != "gpt2") {
      return header_.Unserved(
          kModelKey,
          absl::StrFormat("\"%s\" is not served; served are gpt2 and "
                          "llama",
                          Shown(*model)));
    }
    if (is_sentence_piece_) {
      KVASIR_ASSIGN_OR_RETURN(const std::optional<bool> prefix,
                              header_.Bool("tokenizer.ggml.add_space_prefix"));
      adds_space_ = prefix.value_or(true);
    } else {
      KVASIR_RETURN_IF_ERROR(FindSplit());
    }
    KVASIR_RETURN_IF_ERROR(ReadTokens());
    GgufTokenizer made;
    KVASIR_ASSIGN_OR_RETURN(made.tokenizer_json, TokenizerJson());
    KVASIR_ASSIGN_OR_RETURN(made.config_json, ConfigJson());
    return made;
  }

 private:
  static std::string Shown(std::string_view text) {
    return ReplaceInvalidUtf8(text.substr(0, 80));
  }

  absl::Status FindSplit() {
    KVASIR_ASSIGN_OR_RETURN(const auto name, header_.String(kSplitKey));
    if (!name.has_value()) {
      base::LogWarning(
          "the GGUF file does not say how its tokenizer splits texts; the "
          "default is used, and the model may get other tokens than those it "
          "was trained with",
          {{"file", header_.where()}, {"missing", kSplitKey}});
    }
    for (const SplitRow& row : kSplits) {
      if (row.name == name.value_or("default")) {
        split_ = row;
        return absl::OkStatus();
      }
    }
    return header_.Unserved(
        kSplitKey,
        absl::StrFormat(
            "\"%s\" is not served; served are %s", Shown(*name),
            absl::StrJoin(kSplits, ", ", [](std::string* out, const auto& row) {
              out->append(row.name);
            })));
  }

  absl::Status WrongLength(const char* key, size_t have) const {
    return header_.Error(
        key, absl::StrFormat("want an element for each of the %d tokens, have "
                             "%d",
                             tokens_.size(), have));
  }

  absl::Status ReadTokens() {
    KVASIR_ASSIGN_OR_RETURN(tokens_, header_.Strings(kTokensKey));
    if (tokens_.empty()) {
      return header_.Error(kTokensKey, "is missing or empty");
    }
    KVASIR_ASSIGN_OR_RETURN(types_, header_.Ints(kTypesKey));
    if (types_.empty()) types_.assign(tokens_.size(), kNormal);
    if (types_.size() != tokens_.size()) {
      return WrongLength(kTypesKey, types_.size());
    }
    for (size_t id = 0; id < tokens_.size(); ++id) {
      if (types_[id] < 0 || types_[id] > kByte) {
        return header_.Error(
            kTypesKey, absl::StrFormat("element %d is %d; want 0 to %d", id,
                                       types_[id], static_cast<int>(kByte)));
      }
      if (types_[id] == 0) types_[id] = kNormal;
      if (types_[id] == kUnused) continue;
      if (!IsValidUtf8(tokens_[id])) {
        return header_.Error(
            kTokensKey, absl::StrFormat("token %d is not valid UTF-8: \"%s\"",
                                        id, Shown(tokens_[id])));
      }
      const auto [place, is_new] =
          ids_.emplace(AbslView(tokens_[id]), static_cast<int32_t>(id));
      if (!is_new) {
        return header_.Error(
            kTokensKey, absl::StrFormat("tokens %d and %d are both \"%s\"",
                                        place->second, id, Shown(tokens_[id])));
      }
    }
    return absl::OkStatus();
  }

  // Returns the id that a key names. Empty if the file lacks the key, or if no
  // token has this id.
  absl::StatusOr<std::optional<int32_t>> TokenId(std::string_view name) const {
    const std::string key = absl::StrFormat("tokenizer.ggml.%s_token_id", name);
    KVASIR_ASSIGN_OR_RETURN(const std::optional<int64_t> id, header_.Int(key));
    if (!id.has_value()) return std::optional<int32_t>();
    if (*id < 0 || *id >= static_cast<int64_t>(tokens_.size())) {
      return header_.Error(key,
                           absl::StrFormat("want an id from 0 to %d, have %d",
                                           tokens_.size() - 1, *id));
    }
    const auto place = static_cast<size_t>(*id);
    if (types_[place] == kUnused || tokens_[place].empty()) {
      return std::optional<int32_t>();
    }
    return std::optional<int32_t>(static_cast<int32_t>(*id));
  }

  // Returns the id that a key names. If the file lacks the key, returns
  // `usual`, the id that this token usually has in SentencePiece models.
  absl::StatusOr<std::optional<int32_t>> TokenIdOr(std::string_view name,
                                                   size_t usual) const {
    KVASIR_ASSIGN_OR_RETURN(std::optional<int32_t> id, TokenId(name));
    const std::string key = absl::StrFormat("tokenizer.ggml.%s_token_id", name);
    if (header_.Find(key) == nullptr && is_sentence_piece_ &&
        usual < tokens_.size() &&
        (types_[usual] == kControl || types_[usual] == kUnknown)) {
      id = static_cast<int32_t>(usual);
    }
    return id;
  }

  absl::StatusOr<std::string> TokenizerJson() {
    std::string out = R"({"version":"1.0","truncation":null,"padding":null,)";
    AppendAddedTokens(&out);
    KVASIR_RETURN_IF_ERROR(AppendStages(&out));
    KVASIR_RETURN_IF_ERROR(AppendTemplate(&out));
    KVASIR_RETURN_IF_ERROR(AppendModel(&out));
    out += "}";
    return out;
  }

  void AppendAddedTokens(std::string* out) const {
    *out += R"("added_tokens":[)";
    std::string_view separator;
    for (size_t id = 0; id < tokens_.size(); ++id) {
      const bool special = types_[id] == kControl || types_[id] == kUnknown;
      if ((!special && types_[id] != kUserDefined) || tokens_[id].empty()) {
        continue;
      }
      absl::StrAppendFormat(out, R"(%s{"id":%d,"content":)", separator, id);
      AppendJsonString(tokens_[id], out);
      absl::StrAppendFormat(out,
                            R"(,"single_word":false,"lstrip":false,)"
                            R"("rstrip":%s,"normalized":%s,"special":%s})",
                            TakesSpaces(tokens_[id]) ? "true" : "false",
                            IsRunOfSpaces(tokens_[id]) ? "true" : "false",
                            special ? "true" : "false");
      separator = ",";
    }
    *out += "],";
  }

  // True if a token also takes the spaces and line ends after it. GGUF
  // files have no key for this, but all SentencePiece tokenizers of Phi-3
  // have this flag.
  bool TakesSpaces(std::string_view token) const {
    return is_phi3_ && is_sentence_piece_ && token != "<unk>" &&
           token != "<s>" && token != "<|endoftext|>";
  }

  // True if a token is a run of spaces that is searched in normalized text,
  // where each space is kSpaceMark. Marks in the original text then also belong
  // to such runs, as in SentencePiece.
  bool IsRunOfSpaces(std::string_view token) const {
    return is_sentence_piece_ && !adds_space_ &&
           token.find_first_not_of(' ') == token.npos;
  }

  // Appends the normalizer, the pre-tokenizer and the decoder.
  absl::Status AppendStages(std::string* out) {
    if (!is_sentence_piece_) {
      const std::string byte_level =
          absl::StrFormat(R"({"type":"ByteLevel","add_prefix_space":false,)"
                          R"("trim_offsets":true,"use_regex":%s})",
                          split_.words ? "true" : "false");
      absl::StrAppendFormat(
          out,
          R"("normalizer":%s,"pre_tokenizer":{"type":"Sequence",)"
          R"("pretokenizers":[%s%s%s]},"decoder":%s,)",
          split_.nfc ? R"({"type":"NFC"})" : "null", split_.components,
          split_.components.empty() ? "" : ",", byte_level, byte_level);
      return absl::OkStatus();
    }
    constexpr char kRulesKey[] = "tokenizer.ggml.precompiled_charsmap";
    if (const GgufValue* const rules = header_.Find(kRulesKey);
        rules != nullptr && rules->count > 0) {
      return header_.Unserved(kRulesKey,
                              "rules of a normalizer are not served");
    }
    absl::StrAppendFormat(
        out,
        R"("normalizer":{"type":"Sequence","normalizers":[%s)"
        R"({"type":"Replace","pattern":{"String":" "},"content":"%s"}]},)"
        R"("pre_tokenizer":null,"decoder":{"type":"Sequence","decoders":[)"
        R"({"type":"Replace","pattern":{"String":"%s"},"content":" "},)"
        R"({"type":"ByteFallback"},{"type":"Fuse"}%s]},)",
        adds_space_ ? absl::StrFormat(R"({"type":"Prepend","prepend":"%s"},)",
                                      kSpaceMark)
                    : "",
        kSpaceMark, kSpaceMark,
        adds_space_ ? R"(,{"type":"Strip","content":" ","start":1,"stop":0})"
                    : "");
    return absl::OkStatus();
  }

  absl::Status AppendTemplate(std::string* out) const {
    KVASIR_ASSIGN_OR_RETURN(const std::optional<bool> add_bos,
                            header_.Bool("tokenizer.ggml.add_bos_token"));
    KVASIR_ASSIGN_OR_RETURN(const std::optional<bool> add_eos,
                            header_.Bool("tokenizer.ggml.add_eos_token"));
    KVASIR_ASSIGN_OR_RETURN(const std::optional<int32_t> bos,
                            TokenIdOr("bos", 1));
    KVASIR_ASSIGN_OR_RETURN(const std::optional<int32_t> eos,
                            TokenIdOr("eos", 2));
    std::vector<std::string> items = {R"({"Sequence":{"id":"A","type_id":0}})"};
    std::vector<std::string> table;
    const auto special = [&](int32_t id) {
      std::string token;
      AppendJsonString(tokens_[static_cast<size_t>(id)], &token);
      table.push_back(absl::StrFormat(
          R"(%s:{"id":%s,"ids":[%d],"tokens":[%s]})", token, token, id, token));
      return absl::StrFormat(R"({"SpecialToken":{"id":%s,"type_id":0}})",
                             token);
    };
    if (bos.has_value() &&
        add_bos.value_or(is_sentence_piece_ || split_.adds_bos)) {
      items.insert(items.begin(), special(*bos));
    }
    if (eos.has_value() && add_eos.value_or(false)) {
      items.push_back(special(*eos));
    }
    if (bos == eos && table.size() == 2) table.pop_back();
    absl::StrAppendFormat(
        out,
        R"("post_processor":{"type":"TemplateProcessing","single":[%s],)"
        R"("pair":[],"special_tokens":{%s}},)",
        absl::StrJoin(items, ","), absl::StrJoin(table, ","));
    return absl::OkStatus();
  }

  // Returns how many tokens the vocabulary has. Merges never give a control
  // token, so control tokens at the end of the list become only added
  // tokens, as in the files of most models. Readers of tokenizer.json give
  // added tokens the next free ids. If these ids would be wrong, all tokens
  // stay in the vocabulary.
  size_t EndOfVocabulary() const {
    size_t end = types_.size();
    while (end > 0 && types_[end - 1] == kUnused) --end;
    while (end > 0 && types_[end - 1] == kControl) --end;
    const bool has_gaps =
        std::find(types_.begin(),
                  types_.begin() + static_cast<std::ptrdiff_t>(end),
                  kUnused) != types_.begin() + static_cast<std::ptrdiff_t>(end);
    return has_gaps ? types_.size() : end;
  }

  absl::Status AppendModel(std::string* out) {
    KVASIR_ASSIGN_OR_RETURN(std::optional<int32_t> unknown,
                            TokenIdOr("unknown", 0));
    std::string unknown_token = "null";
    if (is_sentence_piece_ && unknown.has_value()) {
      unknown_token.clear();
      AppendJsonString(tokens_[static_cast<size_t>(*unknown)], &unknown_token);
    }
    absl::StrAppendFormat(
        out,
        R"("model":{"type":"BPE","dropout":null,"unk_token":%s,)"
        R"("continuing_subword_prefix":null,"end_of_word_suffix":null,)"
        R"("fuse_unk":%s,"byte_fallback":%s,"ignore_merges":%s,"vocab":{)",
        unknown_token, is_sentence_piece_ ? "true" : "false",
        is_sentence_piece_ ? "true" : "false",
        split_.ignore_merges ? "true" : "false");
    std::string_view separator;
    const size_t end = EndOfVocabulary();
    for (size_t id = 0; id < tokens_.size(); ++id) {
      if (types_[id] == kUnused || id >= end) continue;
      out->append(separator);
      AppendJsonString(tokens_[id], out);
      absl::StrAppend(out, ":", id);
      separator = ",";
    }
    *out += R"(},"merges":[)";
    KVASIR_RETURN_IF_ERROR(is_sentence_piece_ ? AppendMergesByScore(out)
                                              : AppendMerges(out));
    *out += "]}";
    return absl::OkStatus();
  }

  static void AppendMerge(std::string_view left, std::string_view right,
                          std::string* out) {
    *out += "[";
    AppendJsonString(left, out);
    *out += ",";
    AppendJsonString(right, out);
    *out += "]";
  }

  absl::Status AppendMerges(std::string* out) const {
    KVASIR_ASSIGN_OR_RETURN(const std::vector<std::string_view> merges,
                            header_.Strings(kMergesKey));
    for (size_t i = 0; i < merges.size(); ++i) {
      const std::string_view merge = merges[i];
      // A token may begin with a space.
      const size_t space = merge.find(' ', 1);
      if (space == merge.npos || space + 1 == merge.size() ||
          !IsValidUtf8(merge)) {
        return header_.Error(
            kMergesKey,
            absl::StrFormat("merge %d is \"%s\"; want two tokens with a space "
                            "between them, in UTF-8",
                            i, Shown(merge)));
      }
      const std::string_view left = merge.substr(0, space);
      const std::string_view right = merge.substr(space + 1);
      for (const std::string& part :
           {std::string(left), std::string(right),
            absl::StrCat(AbslView(left), AbslView(right))}) {
        if (ids_.contains(part)) continue;
        return header_.Error(
            kMergesKey,
            absl::StrFormat("merge %d is \"%s\", but there is no token \"%s\"",
                            i, Shown(merge), Shown(part)));
      }
      if (i > 0) *out += ",";
      AppendMerge(left, right, out);
    }
    return absl::OkStatus();
  }

  struct ScoredMerge {
    float score = 0;
    size_t left_chars = 0;
    size_t right_chars = 0;
    int32_t left = 0;
    int32_t right = 0;
  };

  // Every split of a token into two tokens is a merge. Merges of tokens with
  // the highest score come first.
  absl::Status AppendMergesByScore(std::string* out) const {
    KVASIR_ASSIGN_OR_RETURN(const std::vector<float> scores,
                            header_.Floats(kScoresKey));
    if (scores.size() != tokens_.size()) {
      return WrongLength(kScoresKey, scores.size());
    }
    // Bounds the work, which grows with the square of a token's length.
    constexpr size_t kMostBytes = 256;
    // Published vocabularies have at most a few hundred thousand merges. The
    // parser of tokenizer.json refuses more than this many.
    constexpr size_t kMostMerges = 2'500'000;
    std::vector<ScoredMerge> merges;
    for (size_t id = 0; id < tokens_.size(); ++id) {
      const std::string_view token = tokens_[id];
      if (types_[id] != kNormal) continue;
      if (!std::isfinite(scores[id])) {
        return header_.Error(
            kScoresKey,
            absl::StrFormat("element %d is %g; want a finite number", id,
                            scores[id]));
      }
      if (token.size() > kMostBytes) {
        return header_.Error(
            kTokensKey,
            absl::StrFormat("token %d has %d bytes; want at most %d", id,
                            token.size(), kMostBytes));
      }
      const size_t begin = merges.size();
      const size_t chars = CountChars(token);
      size_t left_chars = 0;
      for (size_t at = 1; at < token.size(); ++at) {
        if ((token[at] & 0xc0) == 0x80) continue;  // inside a character
        ++left_chars;
        const auto left = FindNormal(token.substr(0, at));
        if (!left.has_value()) continue;
        const auto right = FindNormal(token.substr(at));
        if (!right.has_value()) continue;
        merges.push_back(
            {scores[id], left_chars, chars - left_chars, *left, *right});
        if (merges.size() > kMostMerges) {
          return header_.Error(
              kTokensKey, absl::StrFormat("the tokens have more than %d merges",
                                          kMostMerges));
        }
      }
      std::sort(merges.begin() + static_cast<std::ptrdiff_t>(begin),
                merges.end(), [](const auto& a, const auto& b) {
                  return std::pair(a.left, a.right) <
                         std::pair(b.left, b.right);
                });
    }
    std::stable_sort(merges.begin(), merges.end(),
                     [](const ScoredMerge& a, const ScoredMerge& b) {
                       return std::tuple(a.score, a.left_chars, a.right_chars) >
                              std::tuple(b.score, b.left_chars, b.right_chars);
                     });
    for (size_t i = 0; i < merges.size(); ++i) {
      if (i > 0) *out += ",";
      AppendMerge(tokens_[static_cast<size_t>(merges[i].left)],
                  tokens_[static_cast<size_t>(merges[i].right)], out);
    }
    return absl::OkStatus();
  }

  std::optional<int32_t> FindNormal(std::string_view token) const {
    const auto found = ids_.find(AbslView(token));
    if (found == ids_.end() ||
        types_[static_cast<size_t>(found->second)] != kNormal) {
      return std::nullopt;
    }
    return found->second;
  }

  absl::StatusOr<std::string> ConfigJson() const {
    json config;
    config["tokenizer_class"] = "PreTrainedTokenizerFast";
    config["clean_up_tokenization_spaces"] = false;
    struct Name {
      const char* field;
      std::string_view key;
      size_t usual;
    };
    constexpr size_t kNone = ~size_t{0};
    for (const Name& name :
         {Name{"bos_token", "bos", 1}, Name{"eos_token", "eos", 2},
          Name{"unk_token", "unknown", 0},
          Name{"pad_token", "padding", kNone}}) {
      KVASIR_ASSIGN_OR_RETURN(const std::optional<int32_t> id,
                              TokenIdOr(name.key, name.usual));
      if (id.has_value()) {
        config[name.field] = tokens_[static_cast<size_t>(*id)];
      }
    }
    constexpr char kTemplateKey[] = "tokenizer.chat_template";
    KVASIR_ASSIGN_OR_RETURN(const auto chat_template,
                            header_.String(kTemplateKey));
    if (chat_template.has_value()) {
      if (!IsValidUtf8(*chat_template)) {
        return header_.Error(kTemplateKey, "is not valid UTF-8");
      }
      config["chat_template"] = *chat_template;
    }
    return config.dump();
  }

  const GgufHeader& header_;
  bool is_phi3_ = false;
  bool is_sentence_piece_ = false;
  bool adds_space_ = false;  // SentencePiece begins each text with a space
  SplitRow split_;
  std::vector<std::string_view> tokens_;  // by id
  std::vector<int64_t> types_;            // by id
  absl::flat_hash_map<absl::string_view, int32_t> ids_;
};

}  // namespace

absl::StatusOr<GgufTokenizer> TokenizerOfGguf(const GgufHeader& header) {
  return GgufTokenizerWriter(header).Run();
}

}  // namespace kvasir::model
