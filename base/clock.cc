#include "base/clock.h"

#include <chrono>

#include "base/anchored_clock.h"

namespace kvasir::base {

const Clock& Clock::Real() {
  static const AnchoredClock clock({
      .wall = [] { return absl::Now(); },
      .steady =
          [] {
            return absl::FromChrono(
                std::chrono::steady_clock::now().time_since_epoch());
          },
  });
  return clock;
}

}  // namespace kvasir::base
