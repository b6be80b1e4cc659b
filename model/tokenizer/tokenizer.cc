#include "model/tokenizer/tokenizer.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "base/sha256.h"
#include "base/status_macros.h"
#include "base/string_view.h"
#include "model/files/file.h"
#include "model/gguf/gguf_header.h"
#include "model/tokenizer/added_tokens.h"
#include "model/tokenizer/bpe.h"
#include "model/tokenizer/detokenizer_stages.h"
#include "model/tokenizer/gguf_tokenizer.h"
#include "model/tokenizer/pre_tokenizer.h"
#include "model/tokenizer/text_budget.h"
#include "model/tokenizer/text_normalizer.h"
#include "model/tokenizer/tokenizer_config.h"
#include "model/tokenizer/tokenizer_json.h"
#include "model/tokenizer/utf8.h"

namespace kvasir::model {

using base::AbslView;

// Everything that a tokenizer's files determine. Constant after construction.
struct TokenizerParts {
  // One item of a post-processor template: the text, or the ids of special
  // tokens before or after it.
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
  // True if files other than tokenizer.json change how texts become ids, or how
  // ids become texts.
  bool is_changed = false;
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

// Refuses added tokens of tokenizer.json whose ids contradict the vocabulary or
// each other.
absl::Status CheckIds(const JsonRef& list, const std::vector<AddedToken>& added,
                      const BpeModel& model) {
  const auto limit = model.tokens().size() + added.size() + kMaxUnusedIds;
  absl::flat_hash_map<int32_t, std::string_view> by_id;
  absl::flat_hash_map<std::string, int32_t> by_content;
  for (size_t i = 0; i < added.size(); ++i) {
    const AddedToken& token = added[i];
    const auto id = static_cast<size_t>(token.id);
    const auto in_vocabulary = model.Find(token.content);
    const auto [holder, is_first] = by_id.emplace(token.id, token.content);
    const auto first_id =
        by_content.emplace(token.content, token.id).first->second;
    std::string trouble;
    if (id >= limit) {
      trouble = absl::StrCat("but ids must be below ", limit);
    } else if (in_vocabulary && *in_vocabulary != token.id) {
      trouble = absl::StrCat("but the vocabulary gives it ", *in_vocabulary);
    } else if (first_id != token.id) {
      trouble =
          absl::StrCat("but also id ", first_id,
                       "; keep the entry that the model was trained with");
    } else if (holder->second != token.content ||
               (!in_vocabulary && model.HasId(id))) {
      trouble =
          absl::StrCat("but that is the id of \"",
                       AbslView(is_first ? std::string_view(model.tokens()[id])
                                         : holder->second),
                       "\"");
    }
    if (!trouble.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat(list.path(), "[", i, "] gives \"", token.content,
                       "\" id ", token.id, ", ", trouble));
    }
  }
  return absl::OkStatus();
}

// Fills the tables that are indexed by id.
void PlaceTokens(const std::vector<AddedToken>& added, TokenizerParts* parts) {
  parts->tokens = parts->model->tokens();
  for (const AddedToken& token : added) {
    const auto id = static_cast<size_t>(token.id);
    if (id >= parts->tokens.size()) parts->tokens.resize(id + 1);
    parts->tokens[id] = token.content;
    parts->added_ids.emplace(token.content, token.id);
  }
  parts->special.assign(parts->tokens.size(), false);
  for (const AddedToken& token : added) {
    if (token.special) parts->special[static_cast<size_t>(token.id)] = true;
  }
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
                                          " ids of at least 0 and below ",
                                          parts.tokens.size()));
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
    return single.Invalid(
        absl::StrCat("at most ", kMaxTemplateItems, " items"));
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

// Reads "cls" or "sep" of a RobertaProcessing or BertProcessing: [token, id].
absl::StatusOr<TokenizerParts::TemplateItem> ReadTokenPair(
    const JsonRef& processor, const char* key, const TokenizerParts& parts) {
  KVASIR_ASSIGN_OR_RETURN(const JsonRef pair, processor.Get(key));
  KVASIR_ASSIGN_OR_RETURN(const auto elements, pair.Elements());
  if (elements.size() != 2) return pair.Invalid("a token and its id");
  KVASIR_ASSIGN_OR_RETURN(const int64_t id, elements[1].Int());
  if (id < 0 || id >= static_cast<int64_t>(parts.tokens.size())) {
    return elements[1].Invalid(
        absl::StrCat("an id of at least 0 and below ", parts.tokens.size()));
  }
  return TokenizerParts::TemplateItem{.ids = {static_cast<int32_t>(id)}};
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
        if (type == "RobertaProcessing" || type == "BertProcessing") {
          KVASIR_ASSIGN_OR_RETURN(auto first,
                                  ReadTokenPair(item, "cls", *parts));
          KVASIR_ASSIGN_OR_RETURN(auto last,
                                  ReadTokenPair(item, "sep", *parts));
          parts->templates.push_back(
              {std::move(first), {.is_text = true}, std::move(last)});
          return absl::OkStatus();
        }
        KVASIR_ASSIGN_OR_RETURN(const JsonRef name, item.Get("type"));
        return name.Unsupported(
            "Sequence, ByteLevel, TemplateProcessing, RobertaProcessing, "
            "BertProcessing");
      });
}

absl::Status ReadTemplates(const JsonRef& root, const TokenizerConfig& config,
                           TokenizerParts* parts) {
  if (config.prompt_template()) {
    TokenizerParts::Template made;
    const auto add = [&](bool adds, const std::string& token) {
      if (adds) made.push_back({.ids = {parts->Find(token).value()}});
    };
    add(config.prompt_template()->adds_bos, config.bos());
    made.push_back({.is_text = true});
    add(config.prompt_template()->adds_eos, config.eos());
    parts->templates.push_back(std::move(made));
    parts->is_changed = true;
    return absl::OkStatus();
  }
  KVASIR_ASSIGN_OR_RETURN(const auto post, root.Find("post_processor"));
  return post ? ReadPostProcessor(*post, parts) : absl::OkStatus();
}

absl::Status ReadPipeline(const JsonRef& root, const TokenizerConfig& config,
                          TokenizerParts* parts) {
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
  KVASIR_RETURN_IF_ERROR(CheckIds(list.value_or(root), added, *parts->model));
  std::vector<AddedToken> in_file;
  MergeAddedTokens(added, &in_file);
  added = in_file;
  KVASIR_RETURN_IF_ERROR(config.AddTokens(*parts->model, &added));
  parts->is_changed = parts->is_changed || added != in_file;
  PlaceTokens(added, parts);
  KVASIR_ASSIGN_OR_RETURN(
      parts->added, AddedTokens::Build(std::move(added), parts->normalizer));
  KVASIR_RETURN_IF_ERROR(ReadTemplates(root, config, parts));
  KVASIR_ASSIGN_OR_RETURN(const auto decoder, root.Find("decoder"));
  if (decoder) {
    KVASIR_ASSIGN_OR_RETURN(parts->detokenizer,
                            DetokenizerStages::FromJson(*decoder));
  }
  return absl::OkStatus();
}

// Sets add_prefix_space of a ByteLevel pre-tokenizer and, if `in_sequence` is
// true, of those inside a Sequence. Returns true if a value changes.
bool SetPrefixSpace(bool value, bool in_sequence, nlohmann::json* pre) {
  if (!pre->is_object()) return false;
  const nlohmann::json type = pre->value("type", nlohmann::json());
  if (type == "Sequence" && in_sequence) {
    bool changed = false;
    const auto parts = pre->find("pretokenizers");
    if (parts == pre->end()) return false;
    for (nlohmann::json& part : *parts) {
      changed |= SetPrefixSpace(value, in_sequence, &part);
    }
    return changed;
  }
  if (type != "ByteLevel") return false;
  nlohmann::json& prefix = (*pre)["add_prefix_space"];
  const nlohmann::json before = std::exchange(prefix, value);
  return before != prefix;
}

// Parses a file that may be beside tokenizer.json. Returns a JSON null if
// `text` is empty.
absl::StatusOr<nlohmann::json> ParseBeside(std::string_view text,
                                           const std::string& name) {
  if (text.empty()) return nlohmann::json();
  return ParseUntrustedJson(text, name);
}

std::optional<JsonRef> RefTo(const nlohmann::json& file, std::string path) {
  if (file.is_null()) return std::nullopt;
  return JsonRef(file, std::move(path));
}

// Returns a text for the hash. It differs between tokenizers that have the same
// tokenizer.json but different configurations.
std::string Describe(const TokenizerConfig& config,
                     const TokenizerParts& parts) {
  std::string text =
      absl::StrCat(config.add_prefix_space().value_or(false), "\n");
  for (const AddedToken& token : parts.added.tokens()) {
    absl::StrAppend(&text, token.content.size(), " ", token.content, " ",
                    token.id, " ", token.special, token.normalized,
                    token.also_raw, token.single_word, token.left_strip,
                    token.right_strip, "\n");
  }
  for (const auto& items : parts.templates) {
    for (const auto& item : items) {
      absl::StrAppend(&text, item.is_text ? "text" : "", " ");
      for (const int32_t id : item.ids) absl::StrAppend(&text, id, " ");
    }
    absl::StrAppend(&text, "\n");
  }
  return text;
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
  // Returns an error if the ids so far, plus the fewest ids for `more_bytes`
  // bytes of text, exceed the limit.
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
    if (parts_.normalizer.empty()) {
      return RunNormalized(text, at_start ? FirstChar(text).size : 0);
    }
    KVASIR_ASSIGN_OR_RETURN(const NormalizedText normal,
                            parts_.normalizer.Apply(text, &budget_));
    return RunNormalized(normal.text, at_start ? normal.front : 0);
  }

  // The first `front` bytes of `text` come from the first character of the
  // whole text.
  absl::Status RunNormalized(std::string_view text, size_t front) {
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
          front - std::min(front, segment.begin), &budget_, &pieces_));
      for (const TextPiece& piece : pieces_.pieces) {
        parts_.model->Encode(piece.text, &scratch_, ids_);
        if (!scratch_.uncovered.empty()) {
          return parts_.model->Uncovered(scratch_);
        }
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
  return FromFiles(
      {.tokenizer = tokenizer_json, .config = config_json, .name = file_name});
}

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::FromFiles(
    const TokenizerFiles& files) {
  auto parts = std::make_unique<TokenizerParts>();
  KVASIR_ASSIGN_OR_RETURN(nlohmann::json file,
                          ParseUntrustedJson(files.tokenizer, files.name));
  const std::string beside = absl::StrCat(" beside ", files.name);
  const std::string config_name = absl::StrCat("tokenizer_config.json", beside);
  KVASIR_ASSIGN_OR_RETURN(const nlohmann::json config_json,
                          ParseBeside(files.config, config_name));
  const std::string map_name = absl::StrCat("special_tokens_map.json", beside);
  KVASIR_ASSIGN_OR_RETURN(const nlohmann::json map_json,
                          ParseBeside(files.special_tokens_map, map_name));
  const std::string added_name = absl::StrCat("added_tokens.json", beside);
  KVASIR_ASSIGN_OR_RETURN(const nlohmann::json added_json,
                          ParseBeside(files.added_tokens, added_name));
  KVASIR_ASSIGN_OR_RETURN(
      const TokenizerConfig config,
      TokenizerConfig::Read(
          {.config = RefTo(config_json, absl::StrCat(config_name, ": config")),
           .special_tokens_map =
               RefTo(map_json, absl::StrCat(map_name, ": map")),
           .added_tokens =
               RefTo(added_json, absl::StrCat(added_name, ": tokens")),
           .config_text = files.config}));
  if (file.is_object() && file.contains("pre_tokenizer") &&
      config.add_prefix_space()) {
    const bool value = *config.add_prefix_space();
    parts->is_changed = SetPrefixSpace(
        value, value && config.prefix_in_sequence(), &file["pre_tokenizer"]);
  }
  const std::string root = absl::StrCat(files.name, ": tokenizer");
  KVASIR_RETURN_IF_ERROR(
      ReadPipeline(JsonRef(file, root), config, parts.get()));
  parts->chat_template = config.chat_template();
  parts->bos_id = parts->Find(config.bos());
  const auto eos = parts->Find(config.eos());
  if (eos) parts->eos_ids.push_back(*eos);
  if (!parts->pre_tokenizer.removes_text()) {
    parts->longest_token_bytes = parts->model->longest_token_bytes();
  }
  parts->hash = base::Sha256Hex(files.tokenizer);
  if (parts->is_changed) {
    parts->hash =
        base::Sha256Hex(absl::StrCat(parts->hash, Describe(config, *parts)));
  }
  return std::unique_ptr<Tokenizer>(new Tokenizer(std::move(parts)));
}

// Returns the text of a file in `folder`, or an empty text if there is none.
absl::StatusOr<std::string> ReadBeside(const std::filesystem::path& folder,
                                       const char* name) {
  std::error_code error;
  if (!std::filesystem::exists(folder / name, error)) return std::string();
  return ReadSmallFile((folder / name).string(), kMaxConfigBytes);
}

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::Load(
    const std::string& path) {
  std::filesystem::path file = path;
  std::error_code error;
  if (std::filesystem::is_directory(file, error)) file /= "tokenizer.json";
  if (MayBeGguf(path) && file.extension() != ".json") {
    KVASIR_ASSIGN_OR_RETURN(const GgufHeader header, GgufHeader::Open(path));
    KVASIR_ASSIGN_OR_RETURN(const GgufTokenizer made, TokenizerOfGguf(header));
    return FromFiles({.tokenizer = made.tokenizer_json,
                      .config = made.config_json,
                      .name = path});
  }
  if (!std::filesystem::exists(file, error)) return NoTokenizer(file);
  const std::filesystem::path folder = file.parent_path();
  KVASIR_ASSIGN_OR_RETURN(const std::string text,
                          ReadSmallFile(file.string(), kMaxFileBytes));
  KVASIR_ASSIGN_OR_RETURN(const std::string config,
                          ReadBeside(folder, "tokenizer_config.json"));
  KVASIR_ASSIGN_OR_RETURN(const std::string map,
                          ReadBeside(folder, "special_tokens_map.json"));
  KVASIR_ASSIGN_OR_RETURN(const std::string added,
                          ReadBeside(folder, "added_tokens.json"));
  KVASIR_ASSIGN_OR_RETURN(std::string chat_template,
                          ReadBeside(folder, "chat_template.jinja"));
  KVASIR_ASSIGN_OR_RETURN(auto tokenizer, FromFiles({.tokenizer = text,
                                                     .config = config,
                                                     .special_tokens_map = map,
                                                     .added_tokens = added,
                                                     .name = file.string()}));
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
    if (!HasToken(id) || (skip_special && IsSpecial(id))) continue;
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

bool Tokenizer::HasToken(int32_t id) const {
  return !IdToToken(id).empty() || id == parts_->model->empty_id();
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
