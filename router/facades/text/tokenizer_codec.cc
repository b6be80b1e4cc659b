#include "router/facades/text/tokenizer_codec.h"

#include <utility>

#include "model/tokenizer/detokenizer.h"

namespace kvasir::router {
namespace {

class TokenizerText final : public Detokenizer {
 public:
  explicit TokenizerText(model::IncrementalDetokenizer detokenizer)
      : detokenizer_(std::move(detokenizer)) {}

  std::string Push(int32_t id) override { return detokenizer_.Push(id); }
  std::string Finish() override { return detokenizer_.Finish(); }

 private:
  model::IncrementalDetokenizer detokenizer_;
};

}  // namespace

absl::StatusOr<std::vector<int32_t>> TokenizerCodec::EncodePrompt(
    const std::string& text, size_t max_ids) const {
  model::EncodeOptions options;
  options.max_ids = max_ids;
  return tokenizer_->Encode(text, options);
}

absl::StatusOr<std::vector<int32_t>> TokenizerCodec::EncodeWord(
    const std::string& text) const {
  model::EncodeOptions options;
  options.add_special_tokens = false;
  return tokenizer_->Encode(text, options);
}

std::unique_ptr<Detokenizer> TokenizerCodec::NewDetokenizer(
    std::span<const int32_t> prompt, bool skip_special) const {
  model::IncrementalDetokenizer detokenizer(*tokenizer_, skip_special);
  detokenizer.Prime(prompt);
  return std::make_unique<TokenizerText>(std::move(detokenizer));
}

std::string TokenizerCodec::TokenText(int32_t id) const {
  return tokenizer_->TokenBytes(id);
}

bool TokenizerCodec::IsSpecial(int32_t id) const {
  return tokenizer_->IsSpecial(id);
}

}  // namespace kvasir::router
