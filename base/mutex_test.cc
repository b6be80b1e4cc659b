#include "base/mutex.h"

#include <thread>

#include "gtest/gtest.h"

namespace kvasir::base {
namespace {

TEST(CondVarTest, ATimedWaitUsesASteadyClock) {
#if defined(KVASIR_TSAN)
  GTEST_SKIP() << "ThreadSanitizer does not support waits with a steady clock";
#endif
  EXPECT_TRUE(CondVar::WaitClock::is_steady);
}

TEST(CondVarTest, AWaitWithoutASignalTimesOut) {
  Mutex mutex;
  CondVar changed;
  MutexLock lock(&mutex);
  EXPECT_TRUE(changed.WaitWithTimeout(&mutex, absl::Milliseconds(1)));
  EXPECT_TRUE(changed.WaitWithTimeout(&mutex, -absl::Hours(1)));
  EXPECT_TRUE(changed.WaitWithTimeout(&mutex, -absl::InfiniteDuration()));
}

// Without the limit kLongestWait, the current time plus such a timeout would
// overflow, and the wait would end at once.
TEST(CondVarTest, ATimeoutBeyondTheClocksRangeWaitsForTheSignal) {
  for (const absl::Duration timeout :
       {absl::InfiniteDuration(), absl::Hours(24 * 365 * 290)}) {
    Mutex mutex;
    CondVar changed;
    bool set = false;
    std::thread other;
    {
      MutexLock lock(&mutex);
      other = std::thread([&] {
        MutexLock inner(&mutex);
        set = true;
        changed.Signal();
      });
      while (!set) ASSERT_FALSE(changed.WaitWithTimeout(&mutex, timeout));
    }
    other.join();
  }
}

}  // namespace
}  // namespace kvasir::base
