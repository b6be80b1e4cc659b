#include "router/base/task_runner.h"

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvasir::router {
namespace {

// A gate at which threads wait until it is opened. Declare it before the
// pool whose tasks use it, because a task may still be inside `Open` when
// `Wait` returns.
class Gate {
 public:
  void Open() {
    base::MutexLock lock(&mutex_);
    open_ = true;
    changed_.SignalAll();
  }
  void Wait() {
    base::MutexLock lock(&mutex_);
    while (!open_) changed_.Wait(&mutex_);
  }

 private:
  base::Mutex mutex_;
  base::CondVar changed_;
  bool open_ ABSL_GUARDED_BY(mutex_) = false;
};

TEST(TaskPoolTest, RefusesATaskWhenItsQueueIsFull) {
  Gate started, release, done;
  TaskPool pool(1, /*max_queued=*/1);
  ASSERT_TRUE(pool.runner()->Post([&] {
    started.Open();
    release.Wait();
  }));
  started.Wait();
  EXPECT_TRUE(pool.runner()->Post([&] { done.Open(); }));
  EXPECT_FALSE(pool.runner()->Post([] {}));
  release.Open();
  done.Wait();
}

TEST(TaskPoolTest, ManyTasksOfOneClientDelayAnotherClientByOneTaskOnly) {
  Gate started, release, done;
  std::vector<std::string> order;
  TaskPool pool(1);
  pool.runner()->Post([&] {
    started.Open();
    release.Wait();
  });
  started.Wait();
  constexpr int kFlood = 50;
  for (int i = 0; i < kFlood; ++i) {
    pool.runner()->PostInTurn("flood", [&, i] {
      order.push_back("flood");
      if (i == kFlood - 1) done.Open();
    });
  }
  pool.runner()->PostInTurn("other", [&] { order.push_back("first"); });
  pool.runner()->PostInTurn("other", [&] { order.push_back("second"); });
  release.Open();
  done.Wait();
  order.resize(4);
  EXPECT_EQ(order,
            (std::vector<std::string>{"flood", "first", "flood", "second"}));
}

TEST(TaskPoolTest, OneClientCannotFillTheWholeQueue) {
  Gate started, release;
  TaskPool pool(1, /*max_queued=*/10);
  pool.runner()->Post([&] {
    started.Open();
    release.Wait();
  });
  started.Wait();
  int accepted = 0;
  for (int i = 0; i < 20; ++i) {
    accepted += pool.runner()->PostInTurn("flood", [] {}) ? 1 : 0;
  }
  EXPECT_EQ(accepted, 5);
  EXPECT_TRUE(pool.runner()->PostInTurn("other", [] {}));
  release.Open();
}

TEST(TaskPoolTest, TheRunnerOutlivesThePoolAndThenRefusesTasks) {
  std::shared_ptr<TaskRunner> runner;
  {
    TaskPool pool(1);
    runner = pool.runner();
  }
  EXPECT_FALSE(runner->Post([] {}));
}

TEST(StrandTest, RunsTasksInOrderAndOneAtATimeOnAPoolOfManyThreads) {
  constexpr int kTasks = 2000;
  std::vector<int> order;  // needs no lock: the strand runs one task at a time
  std::atomic<int> inside{0};
  Gate done;
  TaskPool pool(4);
  const std::shared_ptr<Strand> strand = Strand::Create(pool.runner());
  for (int i = 0; i < kTasks; ++i) {
    strand->Post([&, i] {
      EXPECT_EQ(inside.fetch_add(1), 0);
      order.push_back(i);
      inside.fetch_sub(1);
      if (i == kTasks - 1) done.Open();
    });
  }
  done.Wait();
  ASSERT_EQ(order.size(), static_cast<size_t>(kTasks));
  for (int i = 0; i < kTasks; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], i);
}

// A task that holds a reference to its strand must not keep the strand alive
// after the pool has ended.
TEST(StrandTest, RefusesAndFreesATaskPostedAfterThePoolHasEnded) {
  std::weak_ptr<Strand> weak;
  {
    auto pool = std::make_unique<TaskPool>(1);
    const std::shared_ptr<Strand> strand = Strand::Create(pool->runner());
    weak = strand;
    pool.reset();
    EXPECT_FALSE(strand->Post([strand] {}));
  }
  EXPECT_TRUE(weak.expired());
}

// The strand's tasks wait because another task keeps the pool's only thread
// busy until the pool ends.
TEST(StrandTest, FreesItsWaitingTasksWithoutRunningThemWhenThePoolEnds) {
  std::weak_ptr<Strand> weak;
  auto pool = std::make_unique<TaskPool>(1);
  const std::shared_ptr<TaskRunner> runner = pool->runner();
  Gate started, ended;
  ASSERT_TRUE(runner->Post([&] {
    started.Open();
    ended.Wait();
  }));
  started.Wait();
  // A waiting task owns this pointer. Its deleter runs when the pool drops the
  // task, and lets the running task end.
  std::shared_ptr<void> waiting(nullptr, [&](void*) { ended.Open(); });
  ASSERT_TRUE(runner->Post([waiting = std::move(waiting)] {}));
  {
    const std::shared_ptr<Strand> strand = Strand::Create(runner);
    weak = strand;
    ASSERT_TRUE(strand->Post([strand] {}));
  }
  pool.reset();
  EXPECT_TRUE(weak.expired());
}

}  // namespace
}  // namespace kvasir::router
