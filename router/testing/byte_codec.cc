#include "router/testing/byte_codec.h"

#include <utility>

#include "absl/status/status.h"

namespace kvasir::router {

std::string ByteDetokenizer::Push(int32_t id) {
  if (id < 0 || id > 255) return "";
  held_.push_back(static_cast<char>(id));
  const auto lead = static_cast<unsigned char>(held_[0]);
  const size_t want = lead < 0xC0 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  if (held_.size() < want) return "";
  return std::exchange(held_, "");
}

std::string ByteDetokenizer::Finish() {
  return held_.empty() ? "" : std::string("\xEF\xBF\xBD");
}

absl::StatusOr<std::vector<int32_t>> ByteCodec::EncodePrompt(
    const std::string& text, size_t max_ids) const {
  if (text.size() > max_ids) return absl::OutOfRangeError("too long");
  if (text.find(kByteBad) != std::string::npos) {
    return absl::InvalidArgumentError("text has a byte 1");
  }
  return Ids(text);
}

absl::StatusOr<std::vector<int32_t>> ByteCodec::EncodeWord(
    const std::string& text) const {
  if (text == "</s>") return std::vector<int32_t>{kByteEos};
  return Ids(text);
}

std::unique_ptr<Detokenizer> ByteCodec::NewDetokenizer(std::span<const int32_t>,
                                                       bool) const {
  return std::make_unique<ByteDetokenizer>();
}

std::string ByteCodec::TokenText(int32_t id) const {
  return id >= 0 && id < 128 ? std::string(1, static_cast<char>(id)) : "";
}

std::vector<int32_t> ByteCodec::Ids(const std::string& text) {
  std::vector<int32_t> ids;
  for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
  return ids;
}

}  // namespace kvasir::router
