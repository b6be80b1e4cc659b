// Token ids in their wire form: little-endian uint32, 4 bytes each. The bytes
// are immutable and ref-counted. So a prompt is copied only once, when it
// arrives, even if its request later moves to another replica.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace kvasir::proto {

inline constexpr size_t kBytesPerTokenId = 4;

// A list of token ids. Copies of a TokenBytes share the same bytes.
// Threads: it never changes, so any thread may use it.
class TokenBytes {
 public:
  TokenBytes() = default;

  static TokenBytes FromIds(absl::Span<const int32_t> ids);
  // On a little-endian machine, takes over the memory of `ids`; otherwise
  // copies them.
  static TokenBytes Adopt(std::vector<int32_t> ids);
  // Takes over the memory of `bytes`. Returns INVALID_ARGUMENT if the number of
  // bytes is not a multiple of 4.
  static absl::StatusOr<TokenBytes> FromBytes(std::string bytes);
  // Uses `bytes` without a copy. `owner`, for example a slice of a received
  // message, keeps their memory alive.
  static absl::StatusOr<TokenBytes> FromOwned(
      absl::string_view bytes, std::shared_ptr<const void> owner);

  absl::string_view bytes() const { return bytes_; }
  size_t size_tokens() const { return bytes_.size() / kBytesPerTokenId; }
  bool empty() const { return bytes_.empty(); }
  // Precondition: index < size_tokens().
  int32_t operator[](size_t index) const;
  std::vector<int32_t> ToIds() const { return AppendTo({}); }
  // Returns `ids` followed by the ids of this list, which are copied once.
  std::vector<int32_t> AppendTo(std::vector<int32_t> ids) const;
  // The owner of the memory of bytes(). A copy of this pointer keeps
  // bytes() valid.
  const std::shared_ptr<const void>& owner() const { return owner_; }

 private:
  TokenBytes(absl::string_view bytes, std::shared_ptr<const void> owner)
      : bytes_(bytes), owner_(std::move(owner)) {}

  absl::string_view bytes_;
  std::shared_ptr<const void> owner_;
};

// Appends ids to a growing byte string (the emitted tokens of a stream).
void AppendTokenBytes(absl::Span<const int32_t> ids, std::string* bytes);

}  // namespace kvasir::proto
