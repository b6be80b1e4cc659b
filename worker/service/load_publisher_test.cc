#include "worker/service/load_publisher.h"

#include <atomic>

#include "absl/time/clock.h"
#include "gtest/gtest.h"

namespace kvasir::worker {
namespace {

const absl::Time kStart = absl::FromUnixSeconds(1000);

LoadSnapshot Load(uint32_t running, bool draining = false) {
  LoadSnapshot load;
  load.running = running;
  load.draining = draining;
  return load;
}

LoadSchedule NewSchedule() {
  return LoadSchedule(absl::Milliseconds(100), absl::Seconds(1));
}

TEST(LoadScheduleTest, TheFirstLoadReportIsDueAtOnce) {
  EXPECT_LE(NewSchedule().NextDue(Load(0)), kStart);
}

TEST(LoadScheduleTest, ALoadChangeIsReportedAfterTheInterval) {
  LoadSchedule schedule = NewSchedule();
  schedule.Sent(kStart, Load(0));
  EXPECT_EQ(schedule.NextDue(Load(1)), kStart + absl::Milliseconds(100));
}

TEST(LoadScheduleTest, IfTheLoadDoesNotChangeItIsReportedOnlyAtEachHeartbeat) {
  LoadSchedule schedule = NewSchedule();
  schedule.Sent(kStart, Load(0));
  EXPECT_TRUE(schedule.UpToDate(Load(0)));
  EXPECT_EQ(schedule.NextDue(Load(0)), kStart + absl::Seconds(1));
}

TEST(LoadScheduleTest, AChangeToDrainingIsReportedAtOnce) {
  LoadSchedule schedule = NewSchedule();
  schedule.Sent(kStart, Load(0));
  EXPECT_LE(schedule.NextDue(Load(0, true)), kStart);
}

class CountingWatcher final : public LoadWatcher {
 public:
  void OnReport(const LoadSnapshot& load) override {
    last = load.running;
    ++reports;
  }
  void OnClosed() override { ++closed; }

  std::atomic<uint32_t> last{0};
  std::atomic<int> reports{0};
  std::atomic<int> closed{0};
};

template <typename Condition>
bool Eventually(Condition condition) {
  const absl::Time end = absl::Now() + absl::Seconds(20);
  while (!condition()) {
    if (absl::Now() > end) return false;
    absl::SleepFor(absl::Milliseconds(1));
  }
  return true;
}

TEST(LoadPublisherTest, ManyLoadChangesInOneIntervalAreCombinedIntoFewReports) {
  LoadPublisher publisher(absl::Seconds(100));
  const auto watcher = std::make_shared<CountingWatcher>();
  publisher.Watch(watcher, absl::Milliseconds(50));
  ASSERT_TRUE(Eventually([&] { return watcher->reports == 1; }));
  for (uint32_t i = 1; i <= 10000; ++i) publisher.OnLoad(Load(i));
  EXPECT_TRUE(Eventually([&] { return watcher->last == 10000; }));
  EXPECT_LT(watcher->reports, 100);
}

TEST(LoadPublisherTest, ADrainIsReportedBeforeTheIntervalHasPassed) {
  LoadPublisher publisher(absl::Hours(1));
  const auto watcher = std::make_shared<CountingWatcher>();
  publisher.Watch(watcher, absl::Hours(1));
  ASSERT_TRUE(Eventually([&] { return watcher->reports == 1; }));
  // The report of this load must wait until the interval has passed.
  publisher.OnLoad(Load(1));
  absl::SleepFor(absl::Milliseconds(50));
  publisher.OnLoad(Load(2, /*draining=*/true));
  EXPECT_TRUE(Eventually([&] { return watcher->last == 2; }));
}

TEST(LoadPublisherTest, StopClosesAllPresentAndLaterWatchers) {
  LoadPublisher publisher(absl::Seconds(1));
  const auto early = std::make_shared<CountingWatcher>();
  publisher.Watch(early, absl::ZeroDuration());
  publisher.Stop();
  EXPECT_EQ(early->closed, 1);
  const auto late = std::make_shared<CountingWatcher>();
  publisher.Watch(late, absl::ZeroDuration());
  EXPECT_EQ(late->closed, 1);
}

TEST(LoadPublisherTest, ADestroyedWatcherGetsNoMoreReports) {
  LoadPublisher publisher(absl::Milliseconds(10));
  auto watcher = std::make_shared<CountingWatcher>();
  publisher.Watch(watcher, absl::ZeroDuration());
  ASSERT_TRUE(Eventually([&] { return watcher->reports > 0; }));
  std::weak_ptr<CountingWatcher> weak = watcher;
  watcher.reset();
  EXPECT_TRUE(Eventually([&] { return weak.expired(); }));
}

}  // namespace
}  // namespace kvasir::worker
