// A tokenizer for tests of facades: ids are bytes.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "router/facades/text/text_codec.h"

namespace kvasir::router {

// Ids 0 to 255 are bytes, kByteEos ends a sample, larger ids do not exist.
// Characters are released when complete; kByteBad is refused in prompts.
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
      const std::string& text) const override;
  absl::StatusOr<std::vector<int32_t>> EncodeWord(
      const std::string& text) const override;
  std::unique_ptr<Detokenizer> NewDetokenizer(std::span<const int32_t>,
                                              bool) const override;
  std::string TokenText(int32_t id) const override;
  bool IsSpecial(int32_t id) const override { return id == kByteEos; }

  static std::vector<int32_t> Ids(const std::string& text);
};

}  // namespace kvasir::router
