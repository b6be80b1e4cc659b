// Converts deadlines of calls. gRPC's contexts have wall-clock times. The rest
// of this process uses times of Clock::Real(), which later changes of the wall
// clock do not affect.
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
