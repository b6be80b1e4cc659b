// Compares and names what the ranks of a group tell about themselves.
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
// The most ranks of a group.
inline constexpr uint32_t kMaxTpSize = 256;
// A follower's messages are small: addresses, names, counts. Only the tiles of
// RankReady are larger; they are accepted once, from a rank that was welcomed.
inline constexpr int64_t kMaxFollowerMessageBytes = 64 << 10;
inline constexpr int64_t kMaxReadyBytes = int64_t{32} << 20;
// A rank that vanishes silently ends the group in less than five seconds. That
// includes the time in which processes end.
inline constexpr absl::Duration kDefaultHeartbeatTimeout = absl::Seconds(3);

// When a rank is lost, the step's collective fails on all remaining ranks,
// often shortly before the leader notices the loss. FailStep waits this long
// for the real reason, so that the group does not end with a mere consequence
// of it.
inline constexpr absl::Duration kFirstReason = absl::Seconds(1);
inline bool MayBeAnothers(const absl::Status& why) {
  return absl::IsUnavailable(why) || absl::IsAborted(why);
}

struct IdentityDifference {
  int field = 0;     // its field number
  std::string text;  // "max_model_len is 4096, the leader has 8192"
};

// Returns the first field, by number, in which a follower's identity differs
// from the leader's. Long values are shortened in the text.
std::optional<IdentityDifference> FirstDifference(
    const kvasir::v1::RankIdentity& leaders,
    const kvasir::v1::RankIdentity& followers);

// Returns "rank 1 (node-a, pid 17)", with the host's name made printable.
std::string RankName(const kvasir::v1::RankHello& hello);

// Makes the name of a process printable and shortens it.
std::string PeerName(absl::string_view name);

// Limit for a status text of another process.
inline constexpr size_t kMaxPeerTextBytes = 1024;

// Makes a text of another process printable and shortens it.
std::string PeerText(absl::string_view text);

// A status from another process. A code that is not an error becomes UNKNOWN.
absl::Status PeerStatus(int code, absl::string_view prefix,
                        absl::string_view text);

}  // namespace kvasir::worker
