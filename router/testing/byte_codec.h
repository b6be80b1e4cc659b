// A tokenizer for tests of facades: every byte of the text is a token.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "router/facades/text/text_codec.h"

namespace kvasir::router {

// The ids 0 to 255 are bytes, and kByteEos is the end token. There are no
// larger ids. A character of several bytes is returned when all its bytes have
// arrived. A prompt that contains kByteBad is refused.
inline constexpr int32_t kByteEos = 256;
inline constexpr char kByteBad = '\x01';

class ByteDetokenizer final : public Detokenizer {
 public:
  std::string Push(int32_t id) override;
  std::string Finish() override;

 private:
  std::string held_;
};

class ByteCodec final : public TextCodec {
 public:
  absl::StatusOr<std::vector<int32_t>> EncodePrompt(
      const std::string& text, size_t max_ids) const override;
  absl::StatusOr<std::vector<int32_t>> EncodeWord(
      const std::string& text) const override;
  std::unique_ptr<Detokenizer> NewDetokenizer(std::span<const int32_t>,
                                              bool) const override;
  std::string TokenText(int32_t id) const override;
  bool IsSpecial(int32_t id) const override { return id == kByteEos; }

  static std::vector<int32_t> Ids(const std::string& text);
};

}  // namespace kvasir::router
