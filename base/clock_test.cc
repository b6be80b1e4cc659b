#include "base/clock.h"

#include "base/anchored_clock.h"
#include "gtest/gtest.h"

namespace kvasir::base {
namespace {

absl::Time wall_now;
absl::Duration steady_now;

TEST(AnchoredClockTest,
     AJumpOfTheWallClockDoesNotChangeTheTimeThatTheClockReturns) {
  wall_now = absl::FromUnixSeconds(1000);
  steady_now = absl::Seconds(7);
  const AnchoredClock clock(
      {.wall = [] { return wall_now; }, .steady = [] { return steady_now; }});
  EXPECT_EQ(clock.Now(), absl::FromUnixSeconds(1000));
  wall_now += absl::Hours(1);
  steady_now += absl::Seconds(2);
  EXPECT_EQ(clock.Now(), absl::FromUnixSeconds(1002));
  wall_now -= absl::Hours(3);
  EXPECT_EQ(clock.Now(), absl::FromUnixSeconds(1002));
}

TEST(RealClockTest, TheRealClockStartsAtTheTimeOfTheWallClock) {
  const absl::Time before = absl::Now();
  EXPECT_LT(absl::AbsDuration(Clock::Real().Now() - before), absl::Minutes(1));
}

}  // namespace
}  // namespace kvasir::base
