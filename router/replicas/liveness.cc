#include "router/replicas/liveness.h"

#include <algorithm>

#include "proto/load_heartbeat.h"

namespace kvasir::router {

absl::Duration RunningTime::Advance(absl::Time now) {
  const absl::Duration elapsed =
      std::clamp(now - last_, absl::ZeroDuration(), 2 * kLivenessTick);
  last_ = now;
  return elapsed;
}

void Liveness::OnConnected() {
  const bool again = connected_before_;
  *this = Liveness();
  connected_before_ = true;
  if (again) back_ = absl::ZeroDuration();
}

void Liveness::OnReport(const kvasir::v1::LoadReport& report) {
  const bool hung = state() != State::kAlive;
  silent_ = absl::ZeroDuration();
  if (report.step() != step_) stuck_ = absl::ZeroDuration();
  works_ = report.running() > 0 || report.waiting() > 0;
  step_ = report.step();
  step_limit_ = report.step_limit_ms() == 0
                    ? absl::InfiniteDuration()
                    : absl::Milliseconds(report.step_limit_ms());
  if (hung && state() == State::kAlive) back_ = absl::ZeroDuration();
}

void Liveness::OnTick(absl::Duration elapsed, bool busy) {
  silent_ += elapsed;
  back_ += elapsed;
  if (works_ || busy) {
    stuck_ += elapsed;
    return;
  }
  // Its requests have left, so nothing shows whether it still hangs.
  if (stuck_ >= step_limit_) back_ = absl::ZeroDuration();
  stuck_ = absl::ZeroDuration();
}

Liveness::State Liveness::state() const {
  if (silent_ >= proto::kMissedHeartbeats * proto::kLoadHeartbeat) {
    return State::kSilent;
  }
  return stuck_ >= step_limit_ ? State::kStuck : State::kAlive;
}

uint32_t Liveness::OpenSeats(uint32_t seats) const {
  if (back_ >= kSlowStart) return seats;
  const double share = absl::FDivDuration(back_, kSlowStart);
  return std::min(seats, 1 + static_cast<uint32_t>(share * seats));
}

}  // namespace kvasir::router
