#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "model/tokenizer/tokenizer.h"

namespace kvasir::compress {

// The token ids of a text, with the text's length in bytes.
struct TokenStream {
  std::vector<int32_t> ids;
  int64_t text_bytes = 0;
};

// Reads and encodes a text of any length, on up to `threads` threads. Special
// tokens are neither added nor recognized in the text. Errors: NotFound with
// the path; InvalidArgument if the path is not a regular file; errors of
// Tokenizer::Encode.
absl::StatusOr<TokenStream> EncodeFile(const std::filesystem::path& path,
                                       const model::Tokenizer& tokenizer,
                                       int threads);

// Encodes a text in memory. Errors: those of Tokenizer::Encode.
absl::StatusOr<TokenStream> EncodeText(std::string_view text,
                                       const model::Tokenizer& tokenizer,
                                       int threads);

// Returns the token that the tokenizer puts before a text; empty if it does not
// add one.
absl::StatusOr<std::optional<int32_t>> StartToken(
    const model::Tokenizer& tokenizer);

// Returns byte offsets at which a text may be cut into pieces without
// changing its tokens. The first is 0. The others are beginnings of lines
// that do not begin with white space, about `piece_bytes` apart. This is safe
// because the split patterns of all supported tokenizers end a word before
// such a line.
std::vector<size_t> CutPoints(std::string_view text, size_t piece_bytes);

}  // namespace kvasir::compress
