// Reads tokenizer_config.json and the older files beside it. They can
// change the added tokens, the prompt template and the prefix space of
// tokenizer.json. The tokenizer becomes the one that AutoTokenizer of
// transformers 4.57.1 makes.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "model/tokenizer/added_tokens.h"
#include "model/tokenizer/bpe.h"
#include "model/tokenizer/tokenizer_json.h"

namespace kvasir::model {

// The files beside tokenizer.json; each may be absent.
struct ConfigFiles {
  std::optional<JsonRef> config;              // tokenizer_config.json
  std::optional<JsonRef> special_tokens_map;  // special_tokens_map.json
  std::optional<JsonRef> added_tokens;        // added_tokens.json
  // The text of tokenizer_config.json. New tokens get their ids in the order in
  // which they occur in it.
  std::string_view config_text;
};

// Adds `batch` to `tokens`, as one call of add_tokens in Hugging Face
// tokenizers does:
// - A token that is already in `tokens` keeps its id and its place.
// - A token gets the flags of its last entry in `batch`. Entries that equal the
//   token as it was before the call are ignored.
// - A special token stays special.
// - A token stays searched in the kinds of text, raw or normalized, in
//   which it was searched before. Entries may add the other kind. If the
//   token becomes special, only its first special entry may add it; if the
//   token was special before, no entry may add it.
void MergeAddedTokens(const std::vector<AddedToken>& batch,
                      std::vector<AddedToken>* tokens);

// Threads: immutable, so any thread may use it.
class TokenizerConfig {
 public:
  // The prompt template with which some tokenizer classes replace the
  // post-processor: it puts bos before the text and eos after it.
  struct Template {
    bool adds_bos = false;
    bool adds_eos = false;
  };

  // Changes nothing, for a folder that has only tokenizer.json.
  TokenizerConfig() = default;
  // INVALID_ARGUMENT if a field has a wrong value; the error names the file,
  // the field and the value.
  static absl::StatusOr<TokenizerConfig> Read(const ConfigFiles& files);

  // Changes and extends the tokens of tokenizer.json. A token that the
  // vocabulary lacks gets the next id. INVALID_ARGUMENT if a token already has
  // this id, because the ids of the vocabulary have gaps.
  absl::Status AddTokens(const BpeModel& model,
                         std::vector<AddedToken>* tokens) const;

  // The texts of these tokens; empty if there are none.
  const std::string& bos() const { return bos_; }
  const std::string& eos() const { return eos_; }
  const std::optional<Template>& prompt_template() const { return template_; }
  // The value that replaces add_prefix_space of a ByteLevel pre-tokenizer.
  std::optional<bool> add_prefix_space() const { return add_prefix_space_; }
  // True if an add_prefix_space() of true also applies to a ByteLevel
  // pre-tokenizer inside a Sequence.
  bool prefix_in_sequence() const { return prefix_in_sequence_; }
  const std::string& chat_template() const { return chat_template_; }

 private:
  // A token that a field names.
  struct Name {
    AddedToken token;
    // True if the field gives flags, not only the text.
    bool has_flags = false;
    // True if the flags of added_tokens_decoder do not replace the flags of
    // this token.
    bool keeps_flags = false;
  };
  enum class Source { kConfig, kMap, kOther };
  struct ClassDefaults;

  static const ClassDefaults* FindClass(std::string_view name);
  absl::Status ReadClass(const JsonRef& config, const ClassDefaults* defaults);
  absl::Status ReadNames(const ConfigFiles& files,
                         const ClassDefaults* defaults);
  absl::Status ReadNameLists(const ConfigFiles& files,
                             const std::optional<JsonRef>& extra,
                             const ClassDefaults* defaults);
  absl::Status ReadTokens(const ConfigFiles& files);
  // Returns the tokens to add, in order: the tokens of `given` by their ids,
  // then the tokens that fields name.
  std::vector<const AddedToken*> Batch(
      const std::map<int64_t, AddedToken>& given,
      const std::vector<AddedToken>& in_file) const;
  // Adds the token of `ref`, a string or an object, and returns its text.
  absl::StatusOr<std::string> AddName(const JsonRef& ref, bool keeps_flags,
                                      Source source);

  std::vector<Name> names_;  // in the order in which transformers adds them
  absl::flat_hash_set<std::string> named_;
  // The tokens that special_tokens_map.json names, or that
  // tokenizer_config.json names by a string. If added_tokens.json adds one of
  // them, the token is searched in raw text.
  absl::flat_hash_set<std::string> named_for_added_json_;
  // The tokens of the config's added_tokens_decoder, or of added_tokens.json,
  // with their ids.
  std::vector<std::pair<int64_t, AddedToken>> tokens_;
  // False if the config has added_tokens_decoder. If true, the tokens of
  // tokenizer.json are treated as if added_tokens_decoder listed them.
  bool older_form_ = true;
  std::string where_;  // a file that was read, which errors name
  std::string bos_;
  std::string eos_;
  std::optional<Template> template_;
  std::optional<bool> add_prefix_space_;
  bool prefix_in_sequence_ = false;
  std::string chat_template_;
};

}  // namespace kvasir::model
