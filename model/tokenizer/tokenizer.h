// Text to token ids and back, read from a Hugging Face `tokenizer.json`: BPE,
// byte-level or SentencePiece-style with byte fallback.
#pragma once

#include <cstdint>
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
  // Adds what the post-processor's template adds (usually a leading bos).
  bool add_special_tokens = true;
  // Special tokens written in the text become their ids. False takes them as
  // plain text; added tokens that are not special are found either way. User
  // text that must not forge chat markers is encoded with false.
  bool parse_special = true;
};

// One immutable tokenizer.
//
// Threads: every const method may be called from any number of threads.
// Errors: Load refuses with InvalidArgument (broken or hostile file) or
//   Unimplemented (a component or setting we do not have), naming file, field
//   and value; NotFound where there is no tokenizer.json. Encode refuses a
//   text above kMaxTextBytes, and a text on which a pattern of the file takes
//   too many steps, with InvalidArgument.
// Text: input that is not UTF-8 is read as Unicode recommends, each maximal
//   invalid subsequence as one U+FFFD, which is what a decoder with
//   replacement would hand to the reference implementation.
class Tokenizer {
 public:
  static constexpr size_t kMaxFileBytes = size_t{128} << 20;
  static constexpr size_t kMaxTextBytes = size_t{64} << 20;

  // `path` is a checkpoint folder or a tokenizer.json. A tokenizer_config.json
  // and chat_template.jinja beside it are read too, where present.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Load(
      const std::string& path);

  // The same from the texts of the files; `config_json` may be empty.
  // `file_name` stands in errors.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> FromJson(
      std::string_view tokenizer_json, std::string_view config_json = {},
      const std::string& file_name = "tokenizer.json");

  ~Tokenizer();
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  absl::StatusOr<std::vector<int32_t>> Encode(
      std::string_view text, const EncodeOptions& options = {}) const;

  // Valid UTF-8 always. Ids that name no token are left out, and with
  // `skip_special` special tokens too.
  std::string Decode(std::span<const int32_t> ids, bool skip_special) const;

  // One above the largest id: ids are in [0, vocab_size). A model's logits may
  // be wider than this.
  int32_t vocab_size() const;
  // The token as the file writes it ("Ġhello", "▁hello", "<0x0A>"); empty
  // where `id` names none.
  std::string_view IdToToken(int32_t id) const;
  std::optional<int32_t> TokenToId(std::string_view token) const;
  bool IsSpecial(int32_t id) const;
  // What one token contributes to the text, not necessarily whole characters;
  // empty where `id` names none. (A detokenizer may still strip a leading
  // space.)
  std::string TokenBytes(int32_t id) const;

  // As tokenizer_config.json tells; generation_config.json may know more ends.
  std::optional<int32_t> bos_id() const;
  const std::vector<int32_t>& eos_ids() const;
  // Empty where the checkpoint has none.
  const std::string& chat_template() const;
  // SHA-256 of tokenizer.json in hexadecimal: equal where text and ids mean
  // the same.
  const std::string& hash() const;

  // For IncrementalDetokenizer.
  const DetokenizerStages& detokenizer() const;

 private:
  explicit Tokenizer(std::unique_ptr<TokenizerParts> parts);

  // Constant after construction.
  std::unique_ptr<TokenizerParts> parts_;
};

}  // namespace kvasir::model
