#include "router/replicas/liveness.h"

#include "gtest/gtest.h"

namespace kvasir::router {
namespace {

using State = Liveness::State;

const absl::Time kStart = absl::FromUnixSeconds(1000);

kvasir::v1::LoadReport Report(uint64_t step, uint32_t running,
                              uint32_t step_limit_ms = 10000) {
  kvasir::v1::LoadReport report;
  report.set_step(step);
  report.set_running(running);
  report.set_step_limit_ms(step_limit_ms);
  return report;
}

// Passes `seconds` in ticks, with a report after each second.
void Pass(int seconds, const kvasir::v1::LoadReport& report, Liveness* liveness,
          bool busy = false) {
  for (int second = 0; second < seconds; ++second) {
    for (int tick = 0; tick < 4; ++tick) liveness->OnTick(kLivenessTick, busy);
    liveness->OnReport(report);
  }
}

TEST(RunningTimeTest, APauseOfTheRouterCountsAsTwoTicks) {
  RunningTime time;
  EXPECT_EQ(time.Advance(kStart), absl::ZeroDuration());
  EXPECT_EQ(time.Advance(kStart + absl::Milliseconds(260)),
            absl::Milliseconds(260));
  EXPECT_EQ(time.Advance(kStart + absl::Hours(1)), 2 * kLivenessTick);
  EXPECT_EQ(time.Advance(kStart), absl::ZeroDuration());
}

TEST(LivenessTest, AWorkerThatMissesThreeHeartbeatsIsSilentUntilItReports) {
  Liveness liveness;
  liveness.OnConnected();
  Pass(100, Report(5, 0), &liveness);
  liveness.OnTick(absl::Milliseconds(2999), false);
  EXPECT_EQ(liveness.state(), State::kAlive);
  liveness.OnTick(absl::Milliseconds(1), false);
  EXPECT_EQ(liveness.state(), State::kSilent);
  liveness.OnReport(Report(5, 0));
  EXPECT_EQ(liveness.state(), State::kAlive);
}

TEST(LivenessTest, AWorkerWithWorkThatFinishesNoStepIsStuckUntilItDoes) {
  Liveness liveness;
  liveness.OnConnected();
  liveness.OnReport(Report(7, 1));
  Pass(9, Report(7, 1), &liveness);
  EXPECT_EQ(liveness.state(), State::kAlive);
  Pass(1, Report(7, 1), &liveness);
  EXPECT_EQ(liveness.state(), State::kStuck);
  Pass(5, Report(7, 1), &liveness);
  EXPECT_EQ(liveness.state(), State::kStuck);
  liveness.OnReport(Report(8, 1));
  EXPECT_EQ(liveness.state(), State::kAlive);
}

TEST(LivenessTest, AnIdleWorkerAndOneWithoutALimitAreNeverStuck) {
  Liveness idle;
  idle.OnConnected();
  idle.OnReport(Report(7, 0));
  Pass(100, Report(7, 0), &idle);
  EXPECT_EQ(idle.state(), State::kAlive);
  idle.OnReport(Report(7, 1));
  EXPECT_EQ(idle.state(), State::kAlive) << "the time without work counted";
  Liveness unknown;
  unknown.OnConnected();
  unknown.OnReport(Report(7, 1, 0));
  Pass(100, Report(7, 1, 0), &unknown);
  EXPECT_EQ(unknown.state(), State::kAlive);
}

TEST(LivenessTest, WaitingRequestsAreWorkToo) {
  Liveness liveness;
  liveness.OnConnected();
  kvasir::v1::LoadReport report = Report(7, 0);
  report.set_waiting(1);
  liveness.OnReport(report);
  Pass(10, report, &liveness);
  EXPECT_EQ(liveness.state(), State::kStuck);
}

// A worker reports a request after its first step, which may be the one
// that hangs.
TEST(LivenessTest, RequestsThatTheWorkerHasNotReportedAreWorkToo) {
  Liveness liveness;
  liveness.OnConnected();
  liveness.OnReport(Report(7, 0));
  Pass(10, Report(7, 0), &liveness, /*busy=*/true);
  EXPECT_EQ(liveness.state(), State::kStuck);
  Pass(1, Report(7, 0), &liveness);
  EXPECT_EQ(liveness.state(), State::kAlive) << "the request has ended";
  EXPECT_LT(liveness.OpenSeats(64), 64u) << "it may still hang";
}

TEST(LivenessTest, AllSeatsOfANewWorkerAreOpen) {
  Liveness liveness;
  liveness.OnConnected();
  liveness.OnReport(Report(0, 0));
  EXPECT_EQ(liveness.OpenSeats(64), 64u);
}

TEST(LivenessTest, TheSeatsOfAWorkerThatHasComeBackOpenOneAfterTheOther) {
  for (const bool lost : {false, true}) {
    Liveness liveness;
    liveness.OnConnected();
    liveness.OnReport(Report(0, 0));
    liveness.OnTick(absl::Seconds(3), false);
    if (lost) liveness.OnConnected();
    liveness.OnReport(Report(0, 0));
    EXPECT_EQ(liveness.OpenSeats(64), 1u);
    EXPECT_EQ(liveness.OpenSeats(1), 1u);
    uint32_t last = 1;
    for (int second = 0; second < 10; ++second) {
      Pass(1, Report(0, 0), &liveness);
      EXPECT_GT(liveness.OpenSeats(64), last);
      last = liveness.OpenSeats(64);
    }
    EXPECT_EQ(last, 64u);
    Pass(100, Report(0, 0), &liveness);
    EXPECT_EQ(liveness.OpenSeats(64), 64u);
  }
}

}  // namespace
}  // namespace kvasir::router
