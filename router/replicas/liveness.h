// Decides from a worker's load reports whether the worker hangs. It has no
// clock: its user passes in how much time has passed.
#pragma once

#include <cstdint>

#include "absl/time/time.h"
#include "proto/kvasir/v1/worker.pb.h"

namespace kvasir::router {

// How often the router checks its workers.
inline constexpr absl::Duration kLivenessTick = absl::Milliseconds(250);

// Measures for how long the router could have received reports. If the router
// itself was stopped, its workers must not seem silent.
// Threads: only one thread at a time may use it.
class RunningTime {
 public:
  // Returns the time since the last call, but at most two ticks; zero for the
  // first call.
  absl::Duration Advance(absl::Time now);

 private:
  absl::Time last_ = absl::InfiniteFuture();
};

// Whether a worker hangs, and how much work it may get after it has returned.
// Threads: only one thread at a time may use it. Its owner has a mutex
// for this.
class Liveness {
 public:
  enum class State {
    kAlive,
    kSilent,  // no report for kMissedHeartbeats heartbeats
    // There is work, but no step has finished for the time that the worker
    // names (LoadReport.step_limit_ms). A request may be the cause.
    kStuck,
  };

  // The router has connected to the worker, for the first time or again.
  void OnConnected();
  void OnReport(const kvasir::v1::LoadReport& report);
  // `elapsed` has passed, as RunningTime measures it. `busy` is true if the
  // worker has requests of this router.
  void OnTick(absl::Duration elapsed, bool busy);

  State state() const;
  // How many of a worker's `seats` may be taken. After a worker has come back,
  // the number grows from 1 to all of them in kSlowStart.
  uint32_t OpenSeats(uint32_t seats) const;

  static constexpr absl::Duration kSlowStart = absl::Seconds(10);

 private:
  absl::Duration silent_ = absl::ZeroDuration();  // since the last report
  // How long there has been work since the last step.
  absl::Duration stuck_ = absl::ZeroDuration();
  absl::Duration step_limit_ = absl::InfiniteDuration();
  bool works_ = false;  // the last report shows work
  uint64_t step_ = 0;
  bool connected_before_ = false;
  // The time since the worker came back; infinite if it was never lost.
  absl::Duration back_ = absl::InfiniteDuration();
};

}  // namespace kvasir::router
