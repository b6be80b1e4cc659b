// The tokens of a text file, for commands that score a text.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace kvasir::cli {

struct TextTokens {
  std::vector<int32_t> ids;    // without special tokens
  std::vector<int32_t> bytes;  // bytes of text of each token
  // The token that the tokenizer puts before a text.
  std::optional<int32_t> bos;

  // Repeats the text `passes` times.
  void Repeat(int64_t passes);
};

// Reads a text with the tokenizer in a model's folder. INVALID_ARGUMENT for a
// file of more than 64 MiB; errors of the tokenizer.
absl::StatusOr<TextTokens> ReadTextTokens(const std::string& model,
                                          const std::string& path);

}  // namespace kvasir::cli
