// A steady clock that starts at the wall clock's time. It is Clock::Real() with
// its sources as parameters, so that a test can step them.
#pragma once

#include "absl/time/time.h"
#include "base/clock.h"

namespace kvasir::base {

// Only the first reading of the wall clock counts, because a later step of it
// must not end a request or wake a watchdog. To bring over an absolute time
// from elsewhere (a deadline on the wire), use the time that is left until it:
// Now() + (t - absl::Now()).
// Threads: all methods may be called from any thread.
class AnchoredClock final : public Clock {
 public:
  struct Sources {
    absl::Time (*wall)();
    absl::Duration (*steady)();  // since some fixed instant
  };

  explicit AnchoredClock(Sources sources)
      : steady_(sources.steady), zero_(sources.wall() - sources.steady()) {}

  absl::Time Now() const override { return zero_ + steady_(); }

 private:
  absl::Duration (*const steady_)();
  const absl::Time zero_;  // the wall clock's time when `steady_` was zero
};

}  // namespace kvasir::base
