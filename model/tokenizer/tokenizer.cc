#include "model/tokenizer/tokenizer.h"

#include <filesystem>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "base/sha256.h"
#include "base/status_macros.h"
#include "base/string_view.h"
#include "model/files/file.h"
#include "model/tokenizer/added_tokens.h"
#include "model/tokenizer/bpe.h"
#include "model/tokenizer/detokenizer_stages.h"
#include "model/tokenizer/pre_tokenizer.h"
#include "model/tokenizer/special_tokens_map.h"
#include "model/tokenizer/text_budget.h"
#include "model/tokenizer/text_normalizer.h"
#include "model/tokenizer/tokenizer_json.h"
#include "model/tokenizer/utf8.h"

namespace kvasir::model {

using base::AbslView;

// All data from the files. Constant after construction.
struct TokenizerParts {
  // One item of a post-processor template: ids before, after or between the
  // texts.
  struct TemplateItem {
    bool is_text = false;
    std::vector<int32_t> ids;
  };
  using Template = std::vector<TemplateItem>;

  TextNormalizer normalizer;
  PreTokenizer pre_tokenizer;
  std::unique_ptr<BpeModel> model;
  AddedTokens added;
  std::vector<Template> templates;
  DetokenizerStages detokenizer;
  // The most bytes of a normalized text that one id can stand for; 0 if there
  // is no limit.
  size_t longest_token_bytes = 0;

  std::vector<std::string> tokens;  // indexed by id
  std::vector<bool> special;        // indexed by id
  absl::flat_hash_map<std::string, int32_t> added_ids;

  std::optional<int32_t> bos_id;
  std::vector<int32_t> eos_ids;
  std::string chat_template;
  std::string hash;

  std::optional<int32_t> Find(std::string_view token) const {
    const auto it = added_ids.find(AbslView(token));
    if (it != added_ids.end()) return it->second;
    return model->Find(token);
  }
};

namespace {

constexpr size_t kMaxConfigBytes = size_t{8} << 20;
constexpr size_t kMaxTemplateItems = 64;

// Adds the added tokens to the vocabulary and fills the tables that are indexed
// by id.
absl::Status PlaceTokens(const JsonRef& list,
                         const std::vector<AddedToken>& added,
                         TokenizerParts* parts) {
  parts->tokens = parts->model->tokens();
  const auto limit = parts->tokens.size() + added.size() + kMaxUnusedIds;
  for (size_t i = 0; i < added.size(); ++i) {
    const AddedToken& token = added[i];
    const auto id = static_cast<size_t>(token.id);
    const auto in_vocabulary = parts->model->Find(token.content);
    const bool known = in_vocabulary == token.id;
    const bool taken = id < parts->tokens.size() && !parts->tokens[id].empty();
    std::string trouble;
    if (id >= limit) {
      trouble = absl::StrCat("but ids must be below ", limit);
    } else if (in_vocabulary && !known) {
      trouble = absl::StrCat("but the vocabulary gives it ", *in_vocabulary);
    } else if (taken && !known) {
      trouble =
          absl::StrCat("but that is the id of \"", parts->tokens[id], "\"");
    } else if (!parts->added_ids.emplace(token.content, token.id).second) {
      trouble = "but lists this token twice";
    }
    if (!trouble.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat(list.path(), "[", i, "] gives \"", token.content,
                       "\" id ", token.id, ", ", trouble));
    }
    if (id >= parts->tokens.size()) parts->tokens.resize(id + 1);
    parts->tokens[id] = token.content;
  }
  parts->special.assign(parts->tokens.size(), false);
  for (const AddedToken& token : added) {
    if (token.special) parts->special[static_cast<size_t>(token.id)] = true;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int32_t>> ReadTemplateIds(
    const JsonRef& processor, const JsonRef& item,
    const TokenizerParts& parts) {
  KVASIR_ASSIGN_OR_RETURN(const std::string name, item.GetString("id"));
  KVASIR_ASSIGN_OR_RETURN(const JsonRef table, processor.Get("special_tokens"));
  KVASIR_ASSIGN_OR_RETURN(const JsonRef entry, table.Get(name.c_str()));
  KVASIR_ASSIGN_OR_RETURN(const JsonRef list, entry.Get("ids"));
  KVASIR_ASSIGN_OR_RETURN(const auto elements, list.Elements());
  std::vector<int32_t> ids;
  for (const JsonRef& element : elements) {
    KVASIR_ASSIGN_OR_RETURN(const int64_t id, element.Int());
    if (id < 0 || id >= static_cast<int64_t>(parts.tokens.size()) ||
        ids.size() >= kMaxTemplateItems) {
      return element.Invalid(absl::StrCat("at most ", kMaxTemplateItems,
                                          " ids below ", parts.tokens.size()));
    }
    ids.push_back(static_cast<int32_t>(id));
  }
  return ids;
}

absl::StatusOr<TokenizerParts::Template> ReadTemplate(
    const JsonRef& processor, const TokenizerParts& parts) {
  TokenizerParts::Template result;
  KVASIR_ASSIGN_OR_RETURN(const JsonRef single, processor.Get("single"));
  KVASIR_ASSIGN_OR_RETURN(const auto items, single.Elements());
  if (items.size() > kMaxTemplateItems) {
    return single.Invalid(absl::StrCat("at most ", kMaxTemplateItems));
  }
  int num_texts = 0;
  for (const JsonRef& item : items) {
    KVASIR_ASSIGN_OR_RETURN(const auto sequence, item.Find("Sequence"));
    if (sequence) {
      ++num_texts;
      result.push_back({.is_text = true});
      continue;
    }
    KVASIR_ASSIGN_OR_RETURN(const auto special, item.Find("SpecialToken"));
    if (!special) return item.Invalid("Sequence or SpecialToken");
    TokenizerParts::TemplateItem part;
    KVASIR_ASSIGN_OR_RETURN(part.ids,
                            ReadTemplateIds(processor, *special, parts));
    result.push_back(std::move(part));
  }
  if (num_texts != 1) return single.Invalid("exactly one Sequence");
  return result;
}

absl::Status ReadPostProcessor(const JsonRef& ref, TokenizerParts* parts) {
  return VisitComponents(
      ref, "processors",
      [&](const std::string& type, const JsonRef& item) -> absl::Status {
        // As a post-processor, ByteLevel only changes offsets, which are not
        // used here.
        if (type == "ByteLevel") return absl::OkStatus();
        if (type == "TemplateProcessing") {
          KVASIR_ASSIGN_OR_RETURN(auto read, ReadTemplate(item, *parts));
          parts->templates.push_back(std::move(read));
          return absl::OkStatus();
        }
        KVASIR_ASSIGN_OR_RETURN(const JsonRef name, item.Get("type"));
        return name.Unsupported("Sequence, ByteLevel, TemplateProcessing");
      });
}

absl::Status ReadPipeline(const JsonRef& root, TokenizerParts* parts) {
  KVASIR_ASSIGN_OR_RETURN(const auto normalizer, root.Find("normalizer"));
  if (normalizer) {
    KVASIR_ASSIGN_OR_RETURN(parts->normalizer,
                            TextNormalizer::FromJson(*normalizer));
  }
  KVASIR_ASSIGN_OR_RETURN(const auto pre, root.Find("pre_tokenizer"));
  if (pre) {
    KVASIR_ASSIGN_OR_RETURN(parts->pre_tokenizer, PreTokenizer::FromJson(*pre));
  }
  std::vector<AddedToken> added;
  KVASIR_ASSIGN_OR_RETURN(const auto list, root.Find("added_tokens"));
  if (list) {
    KVASIR_ASSIGN_OR_RETURN(added, AddedTokens::ReadList(*list));
  }
  KVASIR_ASSIGN_OR_RETURN(const JsonRef model, root.Get("model"));
  KVASIR_ASSIGN_OR_RETURN(
      parts->model, BpeModel::FromJson(model, parts->pre_tokenizer.byte_level(),
                                       added.size()));
  KVASIR_RETURN_IF_ERROR(PlaceTokens(list.value_or(root), added, parts));
  KVASIR_ASSIGN_OR_RETURN(
      parts->added, AddedTokens::Build(std::move(added), parts->normalizer));
  KVASIR_ASSIGN_OR_RETURN(const auto post, root.Find("post_processor"));
  if (post) KVASIR_RETURN_IF_ERROR(ReadPostProcessor(*post, parts));
  KVASIR_ASSIGN_OR_RETURN(const auto decoder, root.Find("decoder"));
  if (decoder) {
    KVASIR_ASSIGN_OR_RETURN(parts->detokenizer,
                            DetokenizerStages::FromJson(*decoder));
  }
  return absl::OkStatus();
}

// The id of a token that a field of the configuration names, as "</s>" or as
// {"content": "</s>", ...}. Empty if the field is absent. Also empty if the
// vocabulary has no such token, because some configurations were written for a
// larger vocabulary.
absl::StatusOr<std::optional<int32_t>> ReadNamedToken(
    const JsonRef& config, const char* key, const TokenizerParts& parts) {
  KVASIR_ASSIGN_OR_RETURN(const auto found, config.Find(key));
  if (!found) return std::optional<int32_t>();
  JsonRef name = *found;
  if (name.value().is_object()) {
    KVASIR_ASSIGN_OR_RETURN(name, found->Get("content"));
  }
  KVASIR_ASSIGN_OR_RETURN(const std::string token, name.String());
  return parts.Find(token);
}

// Reads the chat template: a string, or a list of {"name", "template"}, from
// which "default" is used.
absl::StatusOr<std::string> ReadChatTemplate(const JsonRef& config) {
  KVASIR_ASSIGN_OR_RETURN(const auto found, config.Find("chat_template"));
  if (!found) return std::string();
  if (found->value().is_string()) return found->String();
  KVASIR_ASSIGN_OR_RETURN(const auto entries, found->Elements());
  for (const JsonRef& entry : entries) {
    KVASIR_ASSIGN_OR_RETURN(const std::string name, entry.GetString("name"));
    if (name == "default") return entry.GetString("template");
  }
  return std::string();
}

absl::Status ReadConfig(const JsonRef& config, TokenizerParts* parts) {
  KVASIR_ASSIGN_OR_RETURN(parts->bos_id,
                          ReadNamedToken(config, "bos_token", *parts));
  KVASIR_ASSIGN_OR_RETURN(const auto eos,
                          ReadNamedToken(config, "eos_token", *parts));
  KVASIR_ASSIGN_OR_RETURN(const std::string_view default_eos,
                          DefaultEosToken(config));
  if (eos) {
    parts->eos_ids.push_back(*eos);
  } else if (!default_eos.empty()) {
    if (const auto id = parts->Find(default_eos)) parts->eos_ids.push_back(*id);
  }
  KVASIR_ASSIGN_OR_RETURN(parts->chat_template, ReadChatTemplate(config));
  return absl::OkStatus();
}

// Splits and encodes one text, appending to `ids`.
class Encoder {
 public:
  Encoder(const TokenizerParts& parts, std::string_view text,
          const EncodeOptions& options, std::vector<int32_t>* ids)
      : parts_(parts),
        text_(text),
        parse_special_(options.parse_special),
        max_ids_(options.max_ids),
        ids_(ids),
        budget_(text.size()) {}

  absl::Status Run() {
    std::vector<TextSegment> segments;
    parts_.added.Split(/*normalized=*/false, parse_special_, text_, &segments);
    for (const TextSegment& segment : segments) {
      if (segment.id >= 0) {
        ids_->push_back(segment.id);
        continue;
      }
      KVASIR_RETURN_IF_ERROR(
          RunRaw(text_.substr(segment.begin, segment.end - segment.begin),
                 segment.begin == 0));
    }
    return CheckFits(0);
  }

 private:
  // `more_bytes`: the length of a text that is not encoded yet.
  absl::Status CheckFits(size_t more_bytes) const {
    const size_t longest = parts_.longest_token_bytes;
    const size_t more = longest == 0 ? 0 : more_bytes / longest;
    if (ids_->size() <= max_ids_ && more <= max_ids_ - ids_->size()) {
      return absl::OkStatus();
    }
    return absl::OutOfRangeError(
        absl::StrCat("the text has more than ", max_ids_, " tokens"));
  }

  absl::Status RunRaw(std::string_view text, bool at_start) {
    if (parts_.normalizer.empty()) return RunNormalized(text, at_start);
    KVASIR_ASSIGN_OR_RETURN(const NormalizedText normal,
                            parts_.normalizer.Apply(text, &budget_));
    return RunNormalized(normal.text, at_start && !normal.front_stripped);
  }

  absl::Status RunNormalized(std::string_view text, bool at_start) {
    std::vector<TextSegment> segments;
    parts_.added.Split(/*normalized=*/true, parse_special_, text, &segments);
    for (const TextSegment& segment : segments) {
      if (segment.id >= 0) {
        ids_->push_back(segment.id);
        continue;
      }
      KVASIR_RETURN_IF_ERROR(CheckFits(segment.end - segment.begin));
      KVASIR_RETURN_IF_ERROR(parts_.pre_tokenizer.Apply(
          text.substr(segment.begin, segment.end - segment.begin),
          at_start && segment.begin == 0, &budget_, &pieces_));
      for (const TextPiece& piece : pieces_.pieces) {
        parts_.model->Encode(piece.text, &scratch_, ids_);
        KVASIR_RETURN_IF_ERROR(CheckFits(0));
      }
    }
    return absl::OkStatus();
  }

  const TokenizerParts& parts_;
  const std::string_view text_;
  const bool parse_special_;
  const size_t max_ids_;
  std::vector<int32_t>* ids_;
  TextBudget budget_;
  PieceList pieces_;
  BpeModel::Scratch scratch_;
};

std::vector<int32_t> ApplyTemplate(const TokenizerParts::Template& items,
                                   const std::vector<int32_t>& text_ids) {
  std::vector<int32_t> ids;
  for (const auto& item : items) {
    const std::vector<int32_t>& part = item.is_text ? text_ids : item.ids;
    ids.insert(ids.end(), part.begin(), part.end());
  }
  return ids;
}

// Returns the error for a folder without tokenizer.json. FAILED_PRECONDITION if
// the folder has a byte-level BPE tokenizer in two files, which is not
// supported (GPT-2's and OPT's repositories have this form). Otherwise
// NOT_FOUND: callers may serve the model without a tokenizer.
absl::Status NoTokenizer(const std::filesystem::path& file) {
  std::error_code error;
  const std::string text = absl::StrCat(
      "the model has no tokenizer: ", file.string(), " is missing");
  if (!std::filesystem::exists(file.parent_path() / "vocab.json", error) ||
      !std::filesystem::exists(file.parent_path() / "merges.txt", error)) {
    return absl::NotFoundError(text);
  }
  return absl::FailedPreconditionError(
      absl::StrCat(text,
                   "; vocab.json and merges.txt are not supported; "
                   "transformers can convert them to a tokenizer.json "
                   "(AutoTokenizer.from_pretrained, then save_pretrained)"));
}

}  // namespace

Tokenizer::Tokenizer(std::unique_ptr<TokenizerParts> parts)
    : parts_(std::move(parts)) {}
Tokenizer::~Tokenizer() = default;

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::FromJson(
    std::string_view tokenizer_json, std::string_view config_json,
    const std::string& file_name) {
  auto parts = std::make_unique<TokenizerParts>();
  KVASIR_ASSIGN_OR_RETURN(const nlohmann::json file,
                          ParseUntrustedJson(tokenizer_json, file_name));
  KVASIR_RETURN_IF_ERROR(ReadPipeline(
      JsonRef(file, absl::StrCat(file_name, ": tokenizer")), parts.get()));
  if (!config_json.empty()) {
    const std::string config_name =
        absl::StrCat("tokenizer_config.json beside ", file_name);
    KVASIR_ASSIGN_OR_RETURN(const nlohmann::json config,
                            ParseUntrustedJson(config_json, config_name));
    KVASIR_RETURN_IF_ERROR(ReadConfig(
        JsonRef(config, absl::StrCat(config_name, ": config")), parts.get()));
  }
  if (!parts->pre_tokenizer.removes_text()) {
    parts->longest_token_bytes = parts->model->longest_token_bytes();
  }
  parts->hash = base::Sha256Hex(tokenizer_json);
  return std::unique_ptr<Tokenizer>(new Tokenizer(std::move(parts)));
}

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::Load(
    const std::string& path) {
  std::filesystem::path file = path;
  std::error_code error;
  if (std::filesystem::is_directory(file, error)) file /= "tokenizer.json";
  if (!std::filesystem::exists(file, error)) return NoTokenizer(file);
  KVASIR_ASSIGN_OR_RETURN(const std::string text,
                          ReadSmallFile(file.string(), kMaxFileBytes));
  std::string config;
  const auto config_path = file.parent_path() / "tokenizer_config.json";
  if (std::filesystem::exists(config_path, error)) {
    KVASIR_ASSIGN_OR_RETURN(
        config, ReadSmallFile(config_path.string(), kMaxConfigBytes));
  }
  const auto map_path = file.parent_path() / "special_tokens_map.json";
  if (std::filesystem::exists(map_path, error)) {
    KVASIR_ASSIGN_OR_RETURN(const std::string map,
                            ReadSmallFile(map_path.string(), kMaxConfigBytes));
    KVASIR_ASSIGN_OR_RETURN(
        config,
        MergeSpecialTokensMap(config, map, file.parent_path().string()));
  }
  std::string chat_template;
  const auto template_path = file.parent_path() / "chat_template.jinja";
  if (std::filesystem::exists(template_path, error)) {
    KVASIR_ASSIGN_OR_RETURN(
        chat_template, ReadSmallFile(template_path.string(), kMaxConfigBytes));
  }
  KVASIR_ASSIGN_OR_RETURN(auto tokenizer,
                          FromJson(text, config, file.string()));
  if (!chat_template.empty()) {
    tokenizer->parts_->chat_template = std::move(chat_template);
  }
  return tokenizer;
}

absl::StatusOr<std::vector<int32_t>> Tokenizer::Encode(
    std::string_view text, const EncodeOptions& options) const {
  if (text.size() > kMaxTextBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the text has ", text.size(), " bytes, but the tokenizer's limit is ",
        kMaxTextBytes, " bytes"));
  }
  std::string repaired;
  if (!IsValidUtf8(text)) {
    repaired = ReplaceInvalidUtf8(text);
    text = repaired;
  }
  std::vector<int32_t> ids;
  KVASIR_RETURN_IF_ERROR(Encoder(*parts_, text, options, &ids).Run());
  if (options.add_special_tokens) {
    for (const auto& items : parts_->templates) ids = ApplyTemplate(items, ids);
  }
  return ids;
}

std::string Tokenizer::Decode(std::span<const int32_t> ids,
                              bool skip_special) const {
  std::string text;
  DetokenizerState state = parts_->detokenizer.NewState();
  for (const int32_t id : ids) {
    const std::string_view token = IdToToken(id);
    if (token.empty() || (skip_special && IsSpecial(id))) continue;
    parts_->detokenizer.Push(token, &state, &text);
  }
  parts_->detokenizer.Finish(&state, &text);
  return text;
}

int32_t Tokenizer::vocab_size() const {
  return static_cast<int32_t>(parts_->tokens.size());
}

std::string_view Tokenizer::IdToToken(int32_t id) const {
  if (id < 0 || id >= vocab_size()) return {};
  return parts_->tokens[static_cast<size_t>(id)];
}

std::optional<int32_t> Tokenizer::TokenToId(std::string_view token) const {
  return parts_->Find(token);
}

bool Tokenizer::IsSpecial(int32_t id) const {
  return id >= 0 && id < vocab_size() &&
         parts_->special[static_cast<size_t>(id)];
}

std::string Tokenizer::TokenBytes(int32_t id) const {
  const std::string_view token = IdToToken(id);
  if (token.empty() || IsSpecial(id)) return std::string(token);
  return parts_->detokenizer.BytesOf(token);
}

std::optional<int32_t> Tokenizer::bos_id() const { return parts_->bos_id; }
const std::vector<int32_t>& Tokenizer::eos_ids() const {
  return parts_->eos_ids;
}
const std::string& Tokenizer::chat_template() const {
  return parts_->chat_template;
}
const std::string& Tokenizer::hash() const { return parts_->hash; }
const DetokenizerStages& Tokenizer::detokenizer() const {
  return parts_->detokenizer;
}

}  // namespace kvasir::model
