// Reads the tokens of a text file, for commands that score a text.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace kvasir::cli {

struct TextTokens {
  std::vector<int32_t> ids;    // without special tokens
  std::vector<int32_t> bytes;  // how many bytes of text each token stands for
  // The token that the tokenizer puts before a text, if any.
  std::optional<int32_t> bos;

  // Makes the text `passes` times as long by repeating it.
  void Repeat(int64_t passes);
};

// Reads the file `path` and encodes it with the tokenizer in the folder
// `model`. INVALID_ARGUMENT for a file of more than 64 MiB; also the errors of
// the tokenizer.
absl::StatusOr<TextTokens> ReadTextTokens(const std::string& model,
                                          const std::string& path);

}  // namespace kvasir::cli
