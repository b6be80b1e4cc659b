// The replacement rules that SentencePiece compiles into a model
// ("precompiled_charsmap").
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
  // Reads the decoded bytes: the length of a double-array trie, the trie, and
  // texts that each end with a zero byte. INVALID_ARGUMENT if they have another
  // form.
  static absl::StatusOr<PrecompiledRules> FromBytes(std::string_view bytes);

  // Replaces each grapheme of less than 6 bytes, or else each character, that
  // begins with a key of the trie. If several keys match, the shortest one
  // counts, as in the reference. INVALID_ARGUMENT if the result would have more
  // than `max_bytes`, or if a rule points outside the texts.
  absl::StatusOr<std::string> Apply(std::string_view text,
                                    size_t max_bytes) const;

 private:
  // Returns where the replacement of `part` begins in texts_.
  std::optional<size_t> Find(std::string_view part) const;

  std::vector<uint32_t> trie_;
  std::string texts_;
};

}  // namespace kvasir::model
