#include "compress/calibrate/token_stream.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>
#include <system_error>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace kvasir::compress {
namespace {

// Texts are encoded in pieces of this size, which limits the encoder's memory
// and lets threads share the work.
constexpr size_t kPieceBytes = size_t{1} << 20;

absl::StatusOr<std::string> ReadText(const std::filesystem::path& path) {
  std::error_code error;
  const std::filesystem::file_status status =
      std::filesystem::status(path, error);
  if (std::filesystem::exists(status) &&
      !std::filesystem::is_regular_file(status)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path.string(), " is not a regular file"));
  }
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  if (!in) {
    return absl::NotFoundError(absl::StrCat("cannot open ", path.string(), ": ",
                                            std::strerror(errno)));
  }
  std::string text(static_cast<size_t>(in.tellg()), '\0');
  in.seekg(0);
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!in) {
    return absl::UnavailableError(absl::StrCat("cannot read ", path.string()));
  }
  return text;
}

bool IsBlank(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

}  // namespace

std::vector<size_t> CutPoints(std::string_view text, size_t piece_bytes) {
  std::vector<size_t> cuts = {0};
  size_t at = piece_bytes;
  while (at < text.size()) {
    at = text.find('\n', at);
    if (at == std::string_view::npos || at + 1 >= text.size()) break;
    ++at;
    if (IsBlank(text[at])) continue;
    cuts.push_back(at);
    at += piece_bytes;
  }
  return cuts;
}

absl::StatusOr<std::optional<int32_t>> StartToken(
    const model::Tokenizer& tokenizer) {
  // The encoding of an empty text would not show whether a token comes before
  // or after the text.
  constexpr std::string_view kLetter = "a";
  KVASIR_ASSIGN_OR_RETURN(
      const std::vector<int32_t> whole,
      tokenizer.Encode(kLetter, {.add_special_tokens = true}));
  KVASIR_ASSIGN_OR_RETURN(
      const std::vector<int32_t> letter,
      tokenizer.Encode(kLetter, {.add_special_tokens = false}));
  const auto found =
      std::search(whole.begin(), whole.end(), letter.begin(), letter.end());
  if (found == whole.begin()) return std::nullopt;
  return whole.front();
}

absl::StatusOr<TokenStream> EncodeText(std::string_view text,
                                       const model::Tokenizer& tokenizer,
                                       int threads) {
  const std::vector<size_t> cuts = CutPoints(text, kPieceBytes);
  std::vector<absl::StatusOr<std::vector<int32_t>>> pieces(cuts.size());
  std::atomic<size_t> next{0};
  auto work = [&] {
    for (size_t i = next++; i < cuts.size(); i = next++) {
      const size_t end = i + 1 < cuts.size() ? cuts[i + 1] : text.size();
      pieces[i] = tokenizer.Encode(
          text.substr(cuts[i], end - cuts[i]),
          {.add_special_tokens = false, .parse_special = false});
    }
  };
  {
    std::vector<std::jthread> helpers;
    for (int i = 1; i < threads; ++i) helpers.emplace_back(work);
    work();
  }
  TokenStream stream;
  stream.text_bytes = static_cast<int64_t>(text.size());
  for (const absl::StatusOr<std::vector<int32_t>>& piece : pieces) {
    KVASIR_RETURN_IF_ERROR(piece.status());
    stream.ids.insert(stream.ids.end(), piece->begin(), piece->end());
  }
  return stream;
}

absl::StatusOr<TokenStream> EncodeFile(const std::filesystem::path& path,
                                       const model::Tokenizer& tokenizer,
                                       int threads) {
  KVASIR_ASSIGN_OR_RETURN(const std::string text, ReadText(path));
  absl::StatusOr<TokenStream> stream = EncodeText(text, tokenizer, threads);
  if (stream.ok()) return stream;
  return absl::Status(
      stream.status().code(),
      absl::StrCat(path.string(), ": ", stream.status().message()));
}

}  // namespace kvasir::compress
