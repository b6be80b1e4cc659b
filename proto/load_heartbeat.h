// How often a worker reports its load even if it has not changed.
#pragma once

#include "absl/time/time.h"

namespace kvasir::proto {

// A worker repeats its last report after this time.
inline constexpr absl::Duration kLoadHeartbeat = absl::Seconds(1);
// If so many heartbeats are missing, the router regards the worker as hung.
inline constexpr int kMissedHeartbeats = 3;

}  // namespace kvasir::proto
