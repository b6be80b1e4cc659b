#include "base/thread_pool.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace kvasir::base {
namespace {

TEST(ThreadPoolTest, RunCallsTheFunctionOnceOnEveryThread) {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    EXPECT_EQ(threads, pool.num_threads());
    std::vector<int> calls(static_cast<size_t>(threads));
    for (int round = 0; round < 100; ++round) {
      pool.Run([&](int thread) { ++calls[static_cast<size_t>(thread)]; });
    }
    EXPECT_EQ(std::vector<int>(static_cast<size_t>(threads), 100), calls);
  }
}

TEST(ThreadPoolTest,
     ForRangesCoversEveryIndexOnceWithRangesOfNearlyEqualLength) {
  ThreadPool pool(3);
  for (const int64_t count : {0, 1, 2, 3, 7, 100}) {
    std::vector<int> touched(static_cast<size_t>(count));
    std::atomic<int64_t> longest{0};
    pool.ForRanges(count, [&](int64_t begin, int64_t end, int thread) {
      EXPECT_LT(begin, end);
      EXPECT_LT(thread, 3);
      for (int64_t i = begin; i < end; ++i) ++touched[static_cast<size_t>(i)];
      int64_t seen = longest.load();
      while (end - begin > seen &&
             !longest.compare_exchange_weak(seen, end - begin)) {
      }
    });
    EXPECT_EQ(std::vector<int>(static_cast<size_t>(count), 1), touched);
    EXPECT_EQ((count + 2) / 3, longest.load());
  }
}

TEST(ThreadPoolTest,
     ALaunchSeesTheMemoryWritesOfThePreviousLaunchWithoutLocks) {
  ThreadPool pool(4);
  std::vector<int64_t> partial(4, 0);
  int64_t total = 0;
  for (int round = 0; round < 1000; ++round) {
    pool.Run([&](int thread) {
      // `total` depends on what all threads wrote in the previous launch.
      partial[static_cast<size_t>(thread)] = total + thread;
    });
    for (const int64_t value : partial) total += value % 5;
  }
  EXPECT_GT(total, 0);
}

TEST(ThreadPoolTest, SleepingThreadsWakeUpForNewWork) {
  ThreadPool pool(2);
  std::atomic<int> calls{0};
  for (int round = 0; round < 3; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    pool.Run([&](int) { calls.fetch_add(1); });
  }
  EXPECT_EQ(6, calls.load());
}

TEST(ThreadPoolTest, CallsFromSeveralThreadsRunOneAfterAnother) {
  ThreadPool pool(2);
  int64_t counter = 0;  // Not atomic, because launches must not overlap.
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) {
    callers.emplace_back([&] {
      for (int round = 0; round < 200; ++round) {
        pool.Run([&](int thread) {
          if (thread == 1) ++counter;
        });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(600, counter);
}

}  // namespace
}  // namespace kvasir::base
