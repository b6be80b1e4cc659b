#include "worker/load/text_tokens.h"

#include "base/status_macros.h"
#include "model/tokenizer/tokenizer.h"
#include "worker/load/model_source.h"

namespace kvasir::cli {
namespace {

constexpr int64_t kMaxTextBytes = int64_t{64} << 20;

}  // namespace

void TextTokens::Repeat(int64_t passes) {
  const auto once = static_cast<std::ptrdiff_t>(ids.size());
  ids.reserve(ids.size() * static_cast<size_t>(passes));
  bytes.reserve(ids.capacity());
  for (int64_t pass = 1; pass < passes; ++pass) {
    ids.insert(ids.end(), ids.begin(), ids.begin() + once);
    bytes.insert(bytes.end(), bytes.begin(), bytes.begin() + once);
  }
}

absl::StatusOr<TextTokens> ReadTextTokens(const std::string& model,
                                          const std::string& path) {
  KVASIR_ASSIGN_OR_RETURN(const auto tokenizer, model::Tokenizer::Load(model));
  KVASIR_ASSIGN_OR_RETURN(const std::string text,
                          ReadTextFile(path, kMaxTextBytes));
  TextTokens tokens;
  KVASIR_ASSIGN_OR_RETURN(tokens.ids,
                          tokenizer->Encode(text, {.add_special_tokens = false,
                                                   .parse_special = false}));
  for (const int32_t id : tokens.ids) {
    tokens.bytes.push_back(
        static_cast<int32_t>(tokenizer->TokenBytes(id).size()));
  }
  KVASIR_ASSIGN_OR_RETURN(const std::vector<int32_t> prefix,
                          tokenizer->Encode("", {.add_special_tokens = true}));
  if (!prefix.empty()) tokens.bos = prefix.front();
  return tokens;
}

}  // namespace kvasir::cli
