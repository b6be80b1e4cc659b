// Compares the identities that the ranks of a group report. Makes names and
// error messages that other processes sent printable and shortens them, so that
// they can be logged.
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
// The most ranks that a group can have.
inline constexpr uint32_t kMaxTpSize = 256;
// The limit for a follower's messages, which are small: addresses, names,
// counts. Only RankReady may be larger, because of its weight tiles; it is
// accepted once, from a rank that was welcomed.
inline constexpr int64_t kMaxFollowerMessageBytes = 64 << 10;
inline constexpr int64_t kMaxReadyBytes = int64_t{32} << 20;
// Chosen so that all processes of a group end within five seconds after a rank
// has vanished without closing its connection.
inline constexpr absl::Duration kDefaultHeartbeatTimeout = absl::Seconds(3);

// When a rank is lost, the step's collective fails on all remaining ranks,
// often shortly before the leader notices the loss. FailStep waits this long
// for the leader's reason, so that the group does not end with an error that is
// only a consequence of the loss.
inline constexpr absl::Duration kFirstReason = absl::Seconds(1);
inline bool MayBeAConsequence(const absl::Status& why) {
  return absl::IsUnavailable(why) || absl::IsAborted(why);
}

struct IdentityDifference {
  int field = 0;     // field number in RankIdentity
  std::string text;  // like "max_model_len is 4096, the leader has 8192"
};

// Returns the first field, by number, in which a follower's identity differs
// from the leader's. Long values are shortened in the text.
std::optional<IdentityDifference> FirstDifference(
    const kvasir::v1::RankIdentity& leaders,
    const kvasir::v1::RankIdentity& followers);

// Returns a name like "rank 1 (node-a, pid 17)". The host's name is made
// printable.
std::string RankName(const kvasir::v1::RankHello& hello);

// Makes a name that another process sent printable and shortens it.
std::string PeerName(absl::string_view name);

// A status text from another process is cut to this many bytes.
inline constexpr size_t kMaxPeerTextBytes = 1024;

// Like PeerName, for error messages and other texts, which may be
// longer (kMaxPeerTextBytes).
std::string PeerText(absl::string_view text);

// Returns a status that another process sent, with `prefix` before its text. A
// code that is not an error becomes UNKNOWN.
absl::Status PeerStatus(int code, absl::string_view prefix,
                        absl::string_view text);

}  // namespace kvasir::worker
