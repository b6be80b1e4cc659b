// The replacement rules that SentencePiece compiles into a
// model ("precompiled_charsmap").
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace kvasir::model {

// Threads: immutable, so any thread may use it.
class PrecompiledRules {
 public:
  // `bytes` is the decoded form: the length of a double-array trie, the trie,
  // and the replacement texts, each ended by a zero byte. INVALID_ARGUMENT if
  // `bytes` has another form.
  static absl::StatusOr<PrecompiledRules> FromBytes(std::string_view bytes);

  // Replaces each grapheme of less than 6 bytes that begins with a key of the
  // trie. In any other grapheme, replaces each character that begins with a
  // key. If several keys match, the shortest one is used, as in Hugging Face
  // tokenizers. INVALID_ARGUMENT if the result would be longer than
  // `max_bytes`, or if a rule points outside the replacement texts.
  absl::StatusOr<std::string> Apply(std::string_view text,
                                    size_t max_bytes) const;

 private:
  // Returns the offset in texts_ of the replacement of `part`, or nullopt if
  // `part` is not replaced.
  std::optional<size_t> Find(std::string_view part) const;

  std::vector<uint32_t> trie_;
  std::string texts_;
};

}  // namespace kvasir::model
