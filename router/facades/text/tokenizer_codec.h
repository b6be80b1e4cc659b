// Implements TextCodec with a checkpoint's tokenizer.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "model/tokenizer/tokenizer.h"
#include "router/facades/text/text_codec.h"

namespace kvasir::router {

// In a prompt, the text of a control token becomes the token's id. Clients need
// this, because they apply chat templates themselves, and templates contain
// control tokens.
//
// Threads: its methods may be called from any thread.
class TokenizerCodec final : public TextCodec {
 public:
  explicit TokenizerCodec(std::shared_ptr<const model::Tokenizer> tokenizer)
      : tokenizer_(std::move(tokenizer)) {}

  absl::StatusOr<std::vector<int32_t>> EncodePrompt(
      const std::string& text, size_t max_ids) const override;
  absl::StatusOr<std::vector<int32_t>> EncodeWord(
      const std::string& text) const override;
  std::unique_ptr<Detokenizer> NewDetokenizer(std::span<const int32_t> prompt,
                                              bool skip_special) const override;
  std::string TokenText(int32_t id) const override;
  bool IsSpecial(int32_t id) const override;

 private:
  const std::shared_ptr<const model::Tokenizer> tokenizer_;
};

}  // namespace kvasir::router
