// Reads tokenizer_config.json and the older files beside it. They can change
// the added tokens, the prompt template and the prefix space of tokenizer.json.
// The result is that of AutoTokenizer in transformers 4.57.1.
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
  // The text of `config`. New tokens get their ids in the order of the text.
  std::string_view config_text;
};

// Adds `batch` to `tokens`, as one call of the reference's add_tokens does:
// - A token that is already in `tokens` keeps its id and its place.
// - The flags of a token's last entry in `batch` count. Entries equal to the
//   token before the call are ignored.
// - A special token stays special.
// - A token is searched in raw or normalized text if it was before, or if an
//   entry asks for that. If the token becomes special, only its first special
//   entry counts for this; if it was special before, none does.
void MergeAddedTokens(const std::vector<AddedToken>& batch,
                      std::vector<AddedToken>* tokens);

// Threads: immutable, so any thread may use it.
class TokenizerConfig {
 public:
  // A template that the file's tokenizer class makes in place of the
  // post-processor: the text between these two tokens.
  struct Template {
    bool adds_bos = false;
    bool adds_eos = false;
  };

  // Does nothing: no file stands beside tokenizer.json.
  TokenizerConfig() = default;
  // INVALID_ARGUMENT names the file, the field and the value.
  static absl::StatusOr<TokenizerConfig> Read(const ConfigFiles& files);

  // Changes and extends the tokens of tokenizer.json. A token that the
  // vocabulary lacks gets the next free id. INVALID_ARGUMENT if a vocabulary
  // with unused ids has no such id.
  absl::Status AddTokens(const BpeModel& model,
                         std::vector<AddedToken>* tokens) const;

  // The texts of these tokens; empty if there are none.
  const std::string& bos() const { return bos_; }
  const std::string& eos() const { return eos_; }
  const std::optional<Template>& prompt_template() const { return template_; }
  // The value that replaces add_prefix_space of a ByteLevel pre-tokenizer.
  std::optional<bool> add_prefix_space() const { return add_prefix_space_; }
  // Whether a true value also replaces add_prefix_space of a ByteLevel
  // pre-tokenizer inside a Sequence.
  bool prefix_in_sequence() const { return prefix_in_sequence_; }
  const std::string& chat_template() const { return chat_template_; }

 private:
  // A token that a field names.
  struct Name {
    AddedToken token;
    // True if the field gives flags, not only the text.
    bool has_flags = false;
    // True if added_tokens_decoder does not replace these flags.
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
  // The tokens to add, in order: those `given` by id, then the named ones.
  std::vector<const AddedToken*> Batch(
      const std::map<int64_t, AddedToken>& given,
      const std::vector<AddedToken>& in_file) const;
  // Adds the token of `ref`, a string or an object, and returns its text.
  absl::StatusOr<std::string> AddName(const JsonRef& ref, bool keeps_flags,
                                      Source source);

  std::vector<Name> names_;  // as transformers adds them
  absl::flat_hash_set<std::string> named_;
  // The named tokens that added_tokens.json adds as tokens of raw text: those
  // that special_tokens_map.json names, or the config by a plain text.
  absl::flat_hash_set<std::string> named_for_added_json_;
  // The tokens of the config's added_tokens_decoder, or of added_tokens.json,
  // with their ids.
  std::vector<std::pair<int64_t, AddedToken>> tokens_;
  // False if the config has added_tokens_decoder. Otherwise the tokens of
  // tokenizer.json count as if they stood there.
  bool older_form_ = true;
  std::string where_;  // for errors: a file that was read
  std::string bos_;
  std::string eos_;
  std::optional<Template> template_;
  std::optional<bool> add_prefix_space_;
  bool prefix_in_sequence_ = false;
  std::string chat_template_;
};

}  // namespace kvasir::model
