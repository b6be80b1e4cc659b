// Conversions and constants that leader and follower share for a Join call.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "worker/ranks/group/rank_link.h"

namespace kvasir::worker {

// The metadata key of the Join call under which a follower sends the group's
// secret.
inline constexpr char kRankAuthorizationKey[] = "authorization";
inline std::string RankAuthorization(absl::string_view secret) {
  return absl::StrCat("Bearer ", secret);
}

// When a call ends, its last messages, such as a RankAbort, have this long to
// reach the other rank.
inline constexpr absl::Duration kRankLastWords = absl::Seconds(1);

// Returns a buffer that refers to the bytes without a copy and keeps them
// alive.
inline grpc::ByteBuffer BufferOf(RankLink::Bytes bytes) {
  auto* held = new RankLink::Bytes(std::move(bytes));
  const grpc::Slice slice(
      const_cast<char*>((*held)->data()), (*held)->size(),
      [](void* user_data) { delete static_cast<RankLink::Bytes*>(user_data); },
      held);
  return grpc::ByteBuffer(&slice, 1);
}

// Returns a copy of the buffer's bytes. Empty if the buffer has none.
inline std::string BytesOf(const grpc::ByteBuffer& buffer) {
  grpc::Slice slice;
  if (!buffer.DumpToSingleSlice(&slice).ok()) return "";
  return std::string(slice.begin(), slice.end());
}

}  // namespace kvasir::worker
