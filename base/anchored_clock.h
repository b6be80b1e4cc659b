// A steady clock that starts at the wall clock's time. Clock::Real() is an
// AnchoredClock. Tests create one whose time sources they control.
#pragma once

#include "absl/time/time.h"
#include "base/clock.h"

namespace kvasir::base {

// Reads the wall clock only once, so that later changes of the wall clock
// cannot end a request or wake a watchdog. To convert a wall-clock time t (such
// as a deadline on the wire), use Now() + (t - absl::Now()).
class AnchoredClock final : public Clock {
 public:
  struct Sources {
    absl::Time (*wall)();
    absl::Duration (*steady)();  // time since some fixed instant
  };

  explicit AnchoredClock(Sources sources)
      : steady_(sources.steady), zero_(sources.wall() - sources.steady()) {}

  absl::Time Now() const override { return zero_ + steady_(); }

 private:
  absl::Duration (*const steady_)();
  const absl::Time zero_;  // the wall clock's time when `steady_` was zero
};

}  // namespace kvasir::base
