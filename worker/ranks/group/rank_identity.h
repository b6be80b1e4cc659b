// What the ranks of a group tell of themselves, compared and named.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "proto/kvasir/v1/rank.pb.h"

namespace kvasir::worker {

inline constexpr char kRankApiVersion[] = "kvasir.v1";
// Of a group. More are no group that anybody runs.
inline constexpr uint32_t kMaxTpSize = 256;
// What a follower sends is small: addresses, names, counts. But for the tiles
// of its RankReady, which are taken beside that, once, from who is welcome.
inline constexpr int64_t kMaxFollowerMessageBytes = 64 << 10;
inline constexpr int64_t kMaxReadyBytes = int64_t{32} << 20;
// A rank that is lost in silence ends the group in less than five seconds, the
// ends of processes included.
inline constexpr absl::Duration kDefaultHeartbeatTimeout = absl::Seconds(3);

// A step whose collective has lost another rank fails on all that are left, at
// once or a little before the leader hears of that rank itself: its own reason
// is waited for, so that the group does not end of an echo.
inline constexpr absl::Duration kFirstReason = absl::Seconds(1);
inline bool MayBeAnothers(const absl::Status& why) {
  return absl::IsUnavailable(why) || absl::IsAborted(why);
}

struct IdentityDifference {
  int field = 0;     // its number
  std::string text;  // "max_model_len is 4096, the leader has 8192"
};

// The first field, by number, in which a follower's identity is not the
// leader's. Long values are cut in the text.
std::optional<IdentityDifference> FirstDifference(
    const kvasir::v1::RankIdentity& leaders,
    const kvasir::v1::RankIdentity& followers);

// "rank 1 (node-a, pid 17)", whatever the host calls itself.
std::string RankName(const kvasir::v1::RankHello& hello);

// What a process calls itself: printable, and cut to what a name may take.
std::string PeerName(absl::string_view name);

// Of the text that goes along with a status, on its way and in a line of ours.
inline constexpr size_t kMaxPeerTextBytes = 1024;

// A text of another process, for a line of ours: printable, and cut.
std::string PeerText(absl::string_view text);

// A status of another process: a number that is no error's becomes UNKNOWN.
absl::Status PeerStatus(int code, absl::string_view prefix,
                        absl::string_view text);

}  // namespace kvasir::worker
