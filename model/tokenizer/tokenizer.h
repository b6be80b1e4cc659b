// Converts text to token ids and back. The tokenizer is read from a
// Hugging Face `tokenizer.json`: BPE, byte-level or SentencePiece-style
// with byte fallback.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace kvasir::model {

class DetokenizerStages;
struct TokenizerParts;

struct EncodeOptions {
  // Adds the tokens of the post-processor's template (usually a leading bos).
  bool add_special_tokens = true;
  // True: the texts of special tokens become their ids. False: they are encoded
  // like any other text. Added tokens that are not special are found in both
  // cases. Encode user text with false, so that it cannot forge chat markers.
  bool parse_special = true;
  // A text with more ids than this is refused; the template's ids do not count.
  // If the length of the normalized text already shows that there are too many
  // ids, the text is not encoded.
  size_t max_ids = std::numeric_limits<size_t>::max();
};

// The texts of a tokenizer's files. All except `tokenizer` may be empty.
struct TokenizerFiles {
  std::string_view tokenizer;           // tokenizer.json
  std::string_view config;              // tokenizer_config.json
  std::string_view special_tokens_map;  // special_tokens_map.json
  std::string_view added_tokens;        // added_tokens.json
  std::string name = "tokenizer.json";  // errors name it
};

// One immutable tokenizer.
//
// Threads: every const method may be called from any number of threads.
// Errors: Load returns INVALID_ARGUMENT for a broken or hostile file and
// UNIMPLEMENTED for an unsupported component or setting; the text names file,
// field and value. It returns NOT_FOUND if there is no tokenizer.json, but
// FAILED_PRECONDITION if there are vocab.json and merges.txt instead. Encode
// returns INVALID_ARGUMENT for a text that is longer than kMaxTextBytes, or on
// which a pattern of the file takes too many steps. It returns OUT_OF_RANGE for
// a text with more than EncodeOptions::max_ids ids.
//
// Input that is not UTF-8 is read as Unicode recommends: each maximal invalid
// subsequence becomes one U+FFFD. The ids are those of the reference
// implementation for the text after this replacement.
class Tokenizer {
 public:
  static constexpr size_t kMaxFileBytes = size_t{128} << 20;
  static constexpr size_t kMaxTextBytes = size_t{64} << 20;

  // `path` is a checkpoint folder, a tokenizer.json or a GGUF file. The other
  // files of TokenizerFiles and chat_template.jinja are read as well if they
  // are in the same folder.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Load(
      const std::string& path);

  // Makes a tokenizer from the texts of the files. `config_json` may be empty.
  // Errors name `file_name`.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> FromJson(
      std::string_view tokenizer_json, std::string_view config_json = {},
      const std::string& file_name = "tokenizer.json");

  // Makes a tokenizer from the texts of all its files.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> FromFiles(
      const TokenizerFiles& files);

  ~Tokenizer();
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  absl::StatusOr<std::vector<int32_t>> Encode(
      std::string_view text, const EncodeOptions& options = {}) const;

  // The result is always valid UTF-8. Ids that name no token are left out, and
  // so are special tokens if `skip_special` is true.
  std::string Decode(std::span<const int32_t> ids, bool skip_special) const;

  // The largest id plus one. A model may have logits for more ids.
  int32_t vocab_size() const;
  // True if a token, which may be the empty one, has this id.
  bool HasToken(int32_t id) const;
  // The token as the file writes it ("Ġhello", "▁hello", "<0x0A>"). Empty if no
  // token has this id.
  std::string_view IdToToken(int32_t id) const;
  std::optional<int32_t> TokenToId(std::string_view token) const;
  bool IsSpecial(int32_t id) const;
  // The bytes that one token adds to the text. They may be only a part of a
  // character. Empty if no token has this id. A detokenizer may still strip a
  // leading space.
  std::string TokenBytes(int32_t id) const;

  // The ids that tokenizer_config.json or special_tokens_map.json names, or
  // that the tokenizer's class in transformers has. The model's configuration
  // may name further ids that end the output.
  std::optional<int32_t> bos_id() const;
  const std::vector<int32_t>& eos_ids() const;
  // An empty string if the checkpoint has no chat template.
  const std::string& chat_template() const;
  // SHA-256 of tokenizer.json in hex. If other files, such as
  // tokenizer_config.json, change the tokenizer, the hash covers these
  // changes too. Two tokenizers with equal hashes convert texts and ids in
  // the same way.
  const std::string& hash() const;

  // The stages that IncrementalDetokenizer uses.
  const DetokenizerStages& detokenizer() const;

 private:
  explicit Tokenizer(std::unique_ptr<TokenizerParts> parts);

  // Constant after construction.
  std::unique_ptr<TokenizerParts> parts_;
};

}  // namespace kvasir::model
