#include "proto/token_bytes.h"

#include <bit>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace kvasir::proto {
namespace {

constexpr bool kLittleEndian = std::endian::native == std::endian::little;

uint32_t LoadLittleEndian32(const char* from) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(from);
  return static_cast<uint32_t>(bytes[0]) |
         static_cast<uint32_t>(bytes[1]) << 8 |
         static_cast<uint32_t>(bytes[2]) << 16 |
         static_cast<uint32_t>(bytes[3]) << 24;
}

}  // namespace

void AppendTokenBytes(absl::Span<const int32_t> ids, std::string* bytes) {
  size_t at = bytes->size();
  bytes->resize(at + ids.size() * kBytesPerTokenId);
  for (const int32_t id : ids) {
    const auto value = static_cast<uint32_t>(id);
    for (int shift = 0; shift < 32; shift += 8) {
      (*bytes)[at++] = static_cast<char>(value >> shift & 0xff);
    }
  }
}

TokenBytes TokenBytes::FromIds(absl::Span<const int32_t> ids) {
  auto bytes = std::make_shared<std::string>();
  AppendTokenBytes(ids, bytes.get());
  const absl::string_view view = *bytes;
  return TokenBytes(view, std::move(bytes));
}

TokenBytes TokenBytes::Adopt(std::vector<int32_t> ids) {
  if (!kLittleEndian) return FromIds(ids);
  auto owner = std::make_shared<const std::vector<int32_t>>(std::move(ids));
  const absl::string_view view(reinterpret_cast<const char*>(owner->data()),
                               owner->size() * kBytesPerTokenId);
  return TokenBytes(view, std::move(owner));
}

absl::StatusOr<TokenBytes> TokenBytes::FromBytes(std::string bytes) {
  auto owner = std::make_shared<const std::string>(std::move(bytes));
  const absl::string_view view = *owner;
  return FromOwned(view, std::move(owner));
}

absl::StatusOr<TokenBytes> TokenBytes::FromOwned(
    absl::string_view bytes, std::shared_ptr<const void> owner) {
  if (bytes.size() % kBytesPerTokenId != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("the list of token ids has ", bytes.size(),
                     " bytes, but must have a multiple of ", kBytesPerTokenId));
  }
  return TokenBytes(bytes, std::move(owner));
}

int32_t TokenBytes::operator[](size_t index) const {
  return static_cast<int32_t>(
      LoadLittleEndian32(bytes_.data() + index * kBytesPerTokenId));
}

std::vector<int32_t> TokenBytes::AppendTo(std::vector<int32_t> ids) const {
  const size_t begin = ids.size();
  ids.resize(begin + size_tokens());
  if (kLittleEndian) {
    if (!empty()) std::memcpy(ids.data() + begin, bytes_.data(), bytes_.size());
    return ids;
  }
  for (size_t i = begin; i < ids.size(); ++i) ids[i] = (*this)[i - begin];
  return ids;
}

}  // namespace kvasir::proto
