// A steady clock that reads like the wall's: Clock::Real(), with its sources
// given so that a test can step them.
#pragma once

#include "absl/time/time.h"
#include "base/clock.h"

namespace kvasir::base {

// A step of the wall clock must end no request and wake no watchdog, so only
// its first reading counts. Instants of others (a deadline on the wire) are
// brought over by the time left until them: Now() + (t - absl::Now()).
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
  const absl::Time zero_;  // what the wall read when `steady_` was zero
};

}  // namespace kvasir::base
