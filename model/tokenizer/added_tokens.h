// Tokens that are found in the text itself, before BPE: control tokens, and
// words that were added after training.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "model/tokenizer/text_normalizer.h"
#include "model/tokenizer/tokenizer_json.h"

namespace kvasir::model {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool special = false;
  bool normalized = false;   // searched in normalized text
  bool also_raw = false;     // if normalized: searched in raw text, too
  bool single_word = false;  // only if no word character is next to it
  bool left_strip = false;   // includes the whitespace before it
  bool right_strip = false;  // includes the whitespace after it

  bool operator==(const AddedToken&) const = default;
};

// A part of a text: an added token, or the text between two added tokens, which
// has the id -1.
struct TextSegment {
  int32_t id = -1;
  size_t begin = 0;
  size_t end = 0;
};

// Finds the longest of many token texts that begins at a given place. Threads:
// immutable, so any thread may use it.
class TokenTrie {
 public:
  // Adds a text for which LongestAt returns `index`. If the same text is added
  // twice, the first index is used.
  void Add(std::string_view content, int32_t index);
  bool empty() const { return children_.empty(); }

  // Returns the index of the longest added text that begins at `at` in `text`,
  // and sets `size` to its length. Returns -1 if there is none.
  int32_t LongestAt(std::string_view text, size_t at, size_t* size) const;

 private:
  // Maps (node << 8 | byte) to the child node for this byte. The root is
  // node 0.
  absl::flat_hash_map<uint64_t, uint32_t> children_;
  std::vector<int32_t> index_of_node_{-1};
  std::array<bool, 256> starts_{};
};

// Threads: immutable, so any thread may use it.
class AddedTokens {
 public:
  // The largest number of added tokens that a tokenizer may have.
  static constexpr size_t kMaxTokens = 1 << 17;

  // Reads a token without its id from a string, or from an object with
  // "content" and flags. If `special` is true, the token is special whatever
  // its own flag says.
  static absl::StatusOr<AddedToken> ReadToken(const JsonRef& entry,
                                              bool special);
  // `ref` is the file's "added_tokens" array. Tokens with an empty text are
  // left out, as in Hugging Face tokenizers.
  static absl::StatusOr<std::vector<AddedToken>> ReadList(const JsonRef& ref);
  static absl::StatusOr<AddedTokens> Build(std::vector<AddedToken> tokens,
                                           const TextNormalizer& normalizer);

  const std::vector<AddedToken>& tokens() const { return tokens_; }

  // Splits a text at its added tokens, in time linear in the text. If
  // `normalized` is true, `text` was normalized, and only tokens that match
  // normalized text are searched. Otherwise only tokens that match raw text
  // are. If `parse_special` is false, special tokens are ignored.
  void Split(bool normalized, bool parse_special, std::string_view text,
             std::vector<TextSegment>* segments) const;

 private:
  std::vector<AddedToken> tokens_;
  TokenTrie raw_;
  TokenTrie normalized_;
};

}  // namespace kvasir::model
