// A text file as a model reads it, for the commands that score one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace kvasir::cli {

struct TextTokens {
  std::vector<int32_t> ids;    // without special tokens
  std::vector<int32_t> bytes;  // of the text that each stands for
  // What the tokenizer puts before a text.
  std::optional<int32_t> bos;

  // The same text so many times over.
  void Repeat(int64_t passes);
};

// Of the tokenizer in a model's folder. INVALID_ARGUMENT for a file of more
// than 64 MiB; the tokenizer's errors.
absl::StatusOr<TextTokens> ReadTextTokens(const std::string& model,
                                          const std::string& path);

}  // namespace kvasir::cli
