// Converts deadlines of calls. On the wire and in gRPC's contexts they are
// wall-clock times; elsewhere in this process they are times of Clock::Real(),
// which never steps.
#pragma once

#include <chrono>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/clock.h"

namespace kvasir::base {

inline absl::Time FromGrpcDeadline(
    std::chrono::system_clock::time_point deadline) {
  if (deadline == std::chrono::system_clock::time_point::max()) {
    return absl::InfiniteFuture();
  }
  return Clock::Real().Now() + (absl::FromChrono(deadline) - absl::Now());
}

// `deadline` must be finite.
inline std::chrono::system_clock::time_point ToGrpcDeadline(
    absl::Time deadline) {
  return absl::ToChronoTime(absl::Now() + (deadline - Clock::Real().Now()));
}

}  // namespace kvasir::base
