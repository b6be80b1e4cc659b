#include "model/tokenizer/tokenizer_config.h"

#include <algorithm>
#include <array>
#include <tuple>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/string_view.h"

namespace kvasir::model {
namespace {

constexpr std::array kNameKeys = {"bos_token", "eos_token", "unk_token",
                                  "sep_token", "pad_token", "cls_token",
                                  "mask_token"};
constexpr char kListKey[] = "additional_special_tokens";
constexpr std::array<std::pair<const char*, const char*>, 4> kMiddleTokens = {
    {{"prefix_token", "\xE2\x96\x81<PRE>"},
     {"middle_token", "\xE2\x96\x81<MID>"},
     {"suffix_token", "\xE2\x96\x81<SUF>"},
     {"eot_token", "\xE2\x96\x81<EOT>"}}};
constexpr char kExtraKey[] = "extra_special_tokens";

absl::StatusOr<std::optional<JsonRef>> FindIn(const std::optional<JsonRef>& ref,
                                              const char* key) {
  if (!ref) return std::optional<JsonRef>();
  return ref->Find(key);
}

bool Has(const std::optional<JsonRef>& ref, const char* key) {
  return ref && ref->value().contains(key);
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

// Collects the keys of "extra_special_tokens" in the order in which the file
// has them. The parsed JSON sorts its keys.
class ExtraKeys final : public nlohmann::json_sax<nlohmann::json> {
 public:
  const std::vector<std::string>& found() const { return found_; }

  bool start_object(size_t) override {
    ++depth_;
    return true;
  }
  bool end_object() override {
    --depth_;
    return true;
  }
  bool start_array(size_t) override {
    ++depth_;
    return true;
  }
  bool end_array() override {
    --depth_;
    return true;
  }
  bool key(std::string& key) override {
    if (depth_ == 1) inside_ = key == kExtraKey;
    if (depth_ == 2 && inside_) found_.push_back(key);
    return true;
  }
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(int64_t) override { return true; }
  bool number_unsigned(uint64_t) override { return true; }
  bool number_float(double, const std::string&) override { return true; }
  bool string(std::string&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool parse_error(size_t, const std::string&,
                   const nlohmann::detail::exception&) override {
    return false;
  }

 private:
  int depth_ = 0;
  bool inside_ = false;
  std::vector<std::string> found_;
};

}  // namespace

// The defaults that a tokenizer class of transformers adds to the fields of
// the file.
struct TokenizerConfig::ClassDefaults {
  enum Prefix { kFileOnly, kFalse };

  std::string_view name;
  // The tokens that are used if the file does not have the field.
  // Null: no token.
  const char* bos = nullptr;
  const char* eos = nullptr;
  const char* unknown = nullptr;
  const char* pad = nullptr;
  // True if the class treats a token without flags as if the file had stated
  // that all its flags are false.
  bool gives_flags = false;
  // has_template: the class makes a prompt template. adds_bos: the template has
  // bos if the file does not have add_bos_token.
  bool has_template = false;
  bool adds_bos = false;
  // The value of add_prefix_space if the file does not have the field.
  Prefix prefix = kFalse;
  // True if an add_prefix_space of true also applies to a ByteLevel
  // pre-tokenizer inside a Sequence.
  bool prefix_in_sequence = false;
  // True if the class adds four special tokens for filling in the middle of
  // a text.
  bool fills_middle = false;
};

const TokenizerConfig::ClassDefaults* TokenizerConfig::FindClass(
    std::string_view name) {
  static constexpr char kEnd[] = "<|endoftext|>";
  static constexpr std::array<ClassDefaults, 11> kClasses = {{
      {.name = "PreTrainedTokenizer"},
      {.name = "LlamaTokenizer",
       .bos = "<s>",
       .eos = "</s>",
       .unknown = "<unk>",
       .has_template = true,
       .adds_bos = true,
       .prefix = ClassDefaults::kFileOnly},
      {.name = "CodeLlamaTokenizer",
       .bos = "<s>",
       .eos = "</s>",
       .unknown = "<unk>",
       .has_template = true,
       .adds_bos = true,
       .fills_middle = true},
      {.name = "GPT2Tokenizer", .bos = kEnd, .eos = kEnd, .unknown = kEnd},
      {.name = "CodeGenTokenizer", .bos = kEnd, .eos = kEnd, .unknown = kEnd},
      {.name = "GPTNeoXTokenizer",
       .bos = kEnd,
       .eos = kEnd,
       .unknown = kEnd,
       .has_template = true},
      {.name = "Qwen2Tokenizer",
       .eos = kEnd,
       .unknown = kEnd,
       .pad = kEnd,
       .gives_flags = true},
      {.name = "WhisperTokenizer",
       .bos = kEnd,
       .eos = kEnd,
       .unknown = kEnd,
       .gives_flags = true},
      {.name = "BloomTokenizer",
       .bos = "<s>",
       .eos = "</s>",
       .unknown = "<unk>",
       .pad = "<pad>",
       .prefix_in_sequence = true},
      {.name = "GemmaTokenizer",
       .bos = "<bos>",
       .eos = "<eos>",
       .unknown = "<unk>",
       .pad = "<pad>",
       .has_template = true,
       .adds_bos = true},
      {.name = "CohereTokenizer",
       .bos = "<BOS_TOKEN>",
       .eos = "<|END_OF_TURN_TOKEN|>",
       .unknown = "<UNK>",
       .has_template = true,
       .adds_bos = true,
       .prefix_in_sequence = true},
  }};
  if (name.ends_with("Fast")) name.remove_suffix(4);
  const auto found =
      std::find_if(kClasses.begin(), kClasses.end(),
                   [&](const ClassDefaults& row) { return row.name == name; });
  return found == kClasses.end() ? nullptr : &*found;
}

absl::StatusOr<TokenizerConfig> TokenizerConfig::Read(
    const ConfigFiles& files) {
  TokenizerConfig result;
  const ClassDefaults* defaults = nullptr;
  KVASIR_ASSIGN_OR_RETURN(const auto name,
                          FindIn(files.config, "tokenizer_class"));
  if (name) {
    KVASIR_ASSIGN_OR_RETURN(const std::string text, name->String());
    defaults = FindClass(text);
  }
  KVASIR_ASSIGN_OR_RETURN(const auto decoder,
                          FindIn(files.config, "added_tokens_decoder"));
  result.older_form_ = !decoder;
  if (files.special_tokens_map &&
      !files.special_tokens_map->value().is_object()) {
    return files.special_tokens_map->Invalid("an object");
  }
  for (const auto& file :
       {files.added_tokens, files.special_tokens_map, files.config}) {
    if (file) result.where_ = file->path();
  }
  KVASIR_RETURN_IF_ERROR(result.ReadNames(files, defaults));
  KVASIR_RETURN_IF_ERROR(result.ReadTokens(files));
  if (files.config) {
    KVASIR_RETURN_IF_ERROR(result.ReadClass(*files.config, defaults));
    KVASIR_ASSIGN_OR_RETURN(result.chat_template_,
                            ReadChatTemplate(*files.config));
  }
  return result;
}

absl::StatusOr<std::string> TokenizerConfig::AddName(const JsonRef& ref,
                                                     bool keeps_flags,
                                                     Source source) {
  Name name{.has_flags = ref.value().is_object(), .keeps_flags = keeps_flags};
  if (!name.has_flags) {
    KVASIR_ASSIGN_OR_RETURN(const std::string text, ref.String());
    if (text.empty()) return text;
  }
  KVASIR_ASSIGN_OR_RETURN(name.token, AddedTokens::ReadToken(ref, true));
  std::string content = name.token.content;
  named_.insert(content);
  // transformers compares the tokens of added_tokens.json with strings. A token
  // object of tokenizer_config.json never equals a string.
  if (source == Source::kMap ||
      (source == Source::kConfig && !name.has_flags)) {
    named_for_added_json_.insert(content);
  }
  names_.push_back(std::move(name));
  return content;
}

absl::Status TokenizerConfig::ReadNames(const ConfigFiles& files,
                                        const ClassDefaults* defaults) {
  KVASIR_ASSIGN_OR_RETURN(const auto extra, FindIn(files.config, kExtraKey));
  absl::flat_hash_set<std::string> seen;
  for (const char* key : kNameKeys) {
    const std::string_view text = key;
    const char* fallback = nullptr;
    if (defaults != nullptr) {
      fallback = text == "bos_token"   ? defaults->bos
                 : text == "eos_token" ? defaults->eos
                 : text == "unk_token" ? defaults->unknown
                 : text == "pad_token" ? defaults->pad
                                       : nullptr;
    }
    const bool in_map = older_form_ && Has(files.special_tokens_map, key);
    KVASIR_ASSIGN_OR_RETURN(
        auto found,
        FindIn(in_map ? files.special_tokens_map : files.config, key));
    bool keeps_flags = false;
    Source source = in_map ? Source::kMap : Source::kConfig;
    const nlohmann::json default_value = fallback ? fallback : "";
    if (extra && extra->value().is_object() && Has(extra, key)) {
      KVASIR_ASSIGN_OR_RETURN(found, extra->Find(key));
      keeps_flags = true;
      source = Source::kOther;
    } else if (!in_map && !Has(files.config, key) && fallback) {
      found = JsonRef(default_value, absl::StrCat("the default of ", key));
      keeps_flags = true;
      source = Source::kOther;
    }
    if (!found) continue;
    KVASIR_ASSIGN_OR_RETURN(const std::string content,
                            AddName(*found, keeps_flags, source));
    if (text == "bos_token") bos_ = content;
    if (text == "eos_token") eos_ = content;
    if (content.empty()) continue;
    Name& name = names_.back();
    name.has_flags =
        name.has_flags || (defaults != nullptr && defaults->gives_flags &&
                           (fallback || text == "bos_token"));
    // If several fields name the same token, the first field counts.
    if (!seen.insert(content).second) names_.pop_back();
  }
  return ReadNameLists(files, extra, defaults);
}

absl::Status TokenizerConfig::ReadNameLists(const ConfigFiles& files,
                                            const std::optional<JsonRef>& extra,
                                            const ClassDefaults* defaults) {
  // If several fields name the same token, the first field counts. If a list
  // names it several times, the last entry counts.
  absl::flat_hash_set<std::string> seen = named_;
  const auto add = [&](const JsonRef& ref, Source source) -> absl::Status {
    KVASIR_ASSIGN_OR_RETURN(const std::string content,
                            AddName(ref, true, source));
    if (seen.contains(content)) names_.pop_back();
    return absl::OkStatus();
  };
  const auto add_all = [&](const JsonRef& list, Source source) -> absl::Status {
    KVASIR_ASSIGN_OR_RETURN(const auto elements, list.Elements());
    for (const JsonRef& ref : elements)
      KVASIR_RETURN_IF_ERROR(add(ref, source));
    return absl::OkStatus();
  };
  const bool in_map = older_form_ && Has(files.special_tokens_map, kListKey);
  std::optional<JsonRef> more;
  if (in_map) {
    KVASIR_ASSIGN_OR_RETURN(more, files.special_tokens_map->Find(kListKey));
  }
  KVASIR_ASSIGN_OR_RETURN(const auto list, FindIn(files.config, kListKey));
  // If special_tokens_map.json has the list as null, the list of
  // tokenizer_config.json is ignored.
  if (list && (!in_map || more))
    KVASIR_RETURN_IF_ERROR(add_all(*list, Source::kConfig));
  if (more) KVASIR_RETURN_IF_ERROR(add_all(*more, Source::kMap));
  if (defaults != nullptr && defaults->fills_middle) {
    for (const auto& [key, content] : kMiddleTokens) {
      const nlohmann::json fallback = content;
      JsonRef ref(fallback, absl::StrCat("the default of ", key));
      if (Has(files.config, key)) {
        KVASIR_ASSIGN_OR_RETURN(const auto found, files.config->Find(key));
        if (!found) continue;
        ref = *found;
      }
      KVASIR_RETURN_IF_ERROR(add(ref, Source::kOther));
    }
  }
  if (!extra) return absl::OkStatus();
  // Newer versions write a list instead of {"image_token": "<image>", ...}.
  if (extra->value().is_array()) return add_all(*extra, Source::kOther);
  if (!extra->value().is_object()) return extra->Invalid("an object");
  seen = named_;
  ExtraKeys keys;
  nlohmann::json::sax_parse(files.config_text.begin(), files.config_text.end(),
                            &keys);
  for (const std::string& key : keys.found()) {
    if (std::find(kNameKeys.begin(), kNameKeys.end(), key) != kNameKeys.end()) {
      continue;
    }
    KVASIR_ASSIGN_OR_RETURN(const auto ref, extra->Find(key.c_str()));
    if (!ref) continue;
    KVASIR_RETURN_IF_ERROR(add(*ref, Source::kOther));
    if (!names_.empty()) seen.insert(names_.back().token.content);
  }
  return absl::OkStatus();
}

absl::Status TokenizerConfig::ReadTokens(const ConfigFiles& files) {
  KVASIR_ASSIGN_OR_RETURN(const auto decoder,
                          FindIn(files.config, "added_tokens_decoder"));
  if (decoder) {
    if (!decoder->value().is_object()) return decoder->Invalid("an object");
    for (const auto& [key, value] : decoder->value().items()) {
      const JsonRef entry(value, absl::StrCat(decoder->path(), ".", key));
      int32_t id = 0;
      if (!absl::SimpleAtoi(key, &id) || id < 0) {
        return absl::InvalidArgumentError(
            absl::StrCat(decoder->path(), " has the key \"", key,
                         "\", want an id from 0 to 2^31 - 1"));
      }
      KVASIR_ASSIGN_OR_RETURN(const std::string content,
                              entry.GetString("content"));
      if (content.empty()) continue;
      KVASIR_ASSIGN_OR_RETURN(
          AddedToken token,
          AddedTokens::ReadToken(entry, named_.contains(content)));
      tokens_.emplace_back(id, std::move(token));
    }
    return absl::OkStatus();
  }
  if (!files.added_tokens) return absl::OkStatus();
  const JsonRef& file = *files.added_tokens;
  if (!file.value().is_object()) return file.Invalid("an object");
  absl::flat_hash_map<int64_t, std::string> contents;
  for (const auto& [content, value] : file.value().items()) {
    const std::string path = absl::StrCat(file.path(), "[\"", content, "\"]");
    KVASIR_ASSIGN_OR_RETURN(const int64_t id, JsonRef(value, path).Int());
    const auto [other, is_first] = contents.emplace(id, content);
    if (!is_first) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, " is ", id, ", but that is also the id of [\"",
                       other->second, "\"]"));
    }
    const nlohmann::json text = content;
    KVASIR_ASSIGN_OR_RETURN(
        AddedToken token,
        AddedTokens::ReadToken(JsonRef(text, path), named_.contains(content)));
    token.normalized = !named_for_added_json_.contains(content);
    tokens_.emplace_back(id, std::move(token));
  }
  return absl::OkStatus();
}

absl::Status TokenizerConfig::ReadClass(const JsonRef& config,
                                        const ClassDefaults* defaults) {
  prefix_in_sequence_ = defaults != nullptr && defaults->prefix_in_sequence;
  const bool prefix_from_config =
      defaults == nullptr || defaults->prefix == ClassDefaults::kFalse;
  if (Has(config, "add_prefix_space")) {
    KVASIR_ASSIGN_OR_RETURN(const auto found, config.Find("add_prefix_space"));
    if (found && prefix_from_config) {
      KVASIR_ASSIGN_OR_RETURN(add_prefix_space_,
                              config.GetBool("add_prefix_space", false));
    }
  } else if (defaults != nullptr && prefix_from_config) {
    add_prefix_space_ = false;
  }
  if (defaults == nullptr || !defaults->has_template) return absl::OkStatus();
  Template made;
  KVASIR_ASSIGN_OR_RETURN(
      made.adds_bos,
      config.GetBool("add_bos_token",
                     defaults->adds_bos && !Has(config, "add_bos_token")));
  KVASIR_ASSIGN_OR_RETURN(made.adds_eos,
                          config.GetBool("add_eos_token", false));
  for (const auto& [adds, content, key] :
       {std::tuple(made.adds_bos, &bos_, "bos"),
        std::tuple(made.adds_eos, &eos_, "eos")}) {
    if (adds && content->empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat(config.path(), ".add_", key, "_token is true for a ",
                       base::AbslView(defaults->name), ", but ", key,
                       "_token names no token; name one, or set it to false"));
    }
  }
  template_ = made;
  return absl::OkStatus();
}

void MergeAddedTokens(const std::vector<AddedToken>& batch,
                      std::vector<AddedToken>* tokens) {
  const std::vector<AddedToken> before = *tokens;
  absl::flat_hash_map<std::string, size_t> places;
  for (size_t i = 0; i < before.size(); ++i) {
    places.emplace(before[i].content, i);
  }
  // The first special entry of each token that was not special before.
  absl::flat_hash_map<std::string, const AddedToken*> newly_special;
  for (const AddedToken& token : batch) {
    if (!token.special) continue;
    const auto place = places.find(token.content);
    if (place != places.end() && before[place->second].special) continue;
    newly_special.emplace(token.content, &token);
  }
  for (const AddedToken& token : batch) {
    const auto [place, is_new] = places.emplace(token.content, tokens->size());
    const size_t at = place->second;
    if (at < before.size() && before[at] == token) continue;
    AddedToken merged = token;
    bool in_raw = false;
    bool in_normalized = false;
    if (!is_new) {
      const AddedToken& old = (*tokens)[at];
      merged.id = old.id;
      merged.special = token.special || old.special;
      in_raw = !old.normalized || old.also_raw;
      in_normalized = old.normalized;
    }
    const auto special = newly_special.find(token.content);
    const bool was_special = !is_new && (*tokens)[at].special;
    if (special != newly_special.end() || !was_special) {
      const bool normalized = special != newly_special.end()
                                  ? special->second->normalized
                                  : token.normalized;
      in_raw = in_raw || !normalized;
      in_normalized = in_normalized || normalized;
    }
    merged.normalized = in_normalized;
    merged.also_raw = in_normalized && in_raw;
    if (is_new) {
      tokens->push_back(std::move(merged));
    } else {
      (*tokens)[at] = std::move(merged);
    }
  }
}

std::vector<const AddedToken*> TokenizerConfig::Batch(
    const std::map<int64_t, AddedToken>& given,
    const std::vector<AddedToken>& in_file) const {
  // A name without flags is left out if its token is known. A name with flags
  // is left out if `keeps_flags` is false and its token is in
  // added_tokens_decoder (in the older form: in tokenizer.json).
  absl::flat_hash_set<std::string_view> known;
  absl::flat_hash_set<std::string_view> replaces_names;
  std::vector<const AddedToken*> batch;
  for (const AddedToken& token : in_file) {
    known.insert(token.content);
    if (older_form_) replaces_names.insert(token.content);
  }
  for (const auto& [id, token] : given) {
    known.insert(token.content);
    if (!older_form_) replaces_names.insert(token.content);
    batch.push_back(&token);
  }
  for (const Name& name : names_) {
    const std::string_view content = name.token.content;
    if (!name.keeps_flags && replaces_names.contains(content)) continue;
    if (!name.has_flags && known.contains(content)) continue;
    batch.push_back(&name.token);
  }
  return batch;
}

absl::Status TokenizerConfig::AddTokens(const BpeModel& model,
                                        std::vector<AddedToken>* tokens) const {
  std::map<int64_t, AddedToken> given;
  for (const auto& [id, token] : tokens_) given[id] = token;
  absl::flat_hash_map<std::string, int32_t> ids;
  auto next_id = static_cast<int64_t>(model.num_tokens());
  for (const AddedToken& token : *tokens) {
    ids.emplace(token.content, token.id);
    next_id = std::max(next_id, int64_t{token.id} + 1);
    if (!older_form_) continue;
    AddedToken& copy = given[token.id] = token;
    copy.special = copy.special || named_.contains(copy.content);
  }
  std::vector<AddedToken> batch;
  for (const AddedToken* token : Batch(given, *tokens)) {
    const auto [place, is_new] = ids.emplace(token->content, 0);
    if (is_new) {
      const auto known = model.Find(token->content);
      const int64_t id = known ? *known : next_id;
      if (!known && model.HasId(static_cast<size_t>(id))) {
        return absl::InvalidArgumentError(absl::StrCat(
            where_, " adds the token \"", token->content,
            "\", whose id would be ", id, ", the id of \"",
            model.tokens()[static_cast<size_t>(id)],
            "\"; give it an id in added_tokens of tokenizer.json"));
      }
      if (ids.size() > AddedTokens::kMaxTokens) {
        return absl::InvalidArgumentError(
            absl::StrCat(where_, " adds the token \"", token->content,
                         "\", but there are already ", ids.size() - 1,
                         " added tokens, which is the limit"));
      }
      next_id = std::max(next_id, id + 1);
      place->second = static_cast<int32_t>(id);
    }
    batch.push_back(*token);
    batch.back().id = place->second;
  }
  MergeAddedTokens(batch, tokens);
  return absl::OkStatus();
}

}  // namespace kvasir::model
