// Threads on which facades work, because gRPC has few reaction threads: a small
//   pool, and strands on it. Each strand runs its tasks one at a time and in
//   order.
#pragma once

#include <cstddef>
#include <deque>
#include <limits>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "base/mutex.h"

namespace kvasir::router {

using Task = absl::AnyInvocable<void()>;

// Threads: any thread.
class TaskRunner {
 public:
  virtual ~TaskRunner() = default;
  // Returns false if the task was dropped, because the queue is full or the
  // threads have ended.
  virtual bool Post(Task task) = 0;
};

// Owns: its threads. The destructor drops tasks that have not begun and joins
//   the threads. runner() may outlive the pool and then refuses tasks.
class TaskPool {
 public:
  explicit TaskPool(int num_threads,
                    size_t max_queued = std::numeric_limits<size_t>::max());
  ~TaskPool();
  TaskPool(const TaskPool&) = delete;
  TaskPool& operator=(const TaskPool&) = delete;

  const std::shared_ptr<TaskRunner>& runner() const { return runner_; }

 private:
  class Queue;

  const std::shared_ptr<Queue> queue_;
  const std::shared_ptr<TaskRunner> runner_;
  std::vector<std::thread> threads_;
};

// Runs its tasks one at a time, in the order of their posts. It takes one place
// in the underlying queue, however many tasks wait. If the runner refuses or
// drops that place, the strand drops its tasks, because tasks may own what owns
// the strand.
class Strand final : public TaskRunner,
                     public std::enable_shared_from_this<Strand> {
 public:
  static std::shared_ptr<Strand> Create(std::shared_ptr<TaskRunner> runner);

  bool Post(Task task) override;

 private:
  explicit Strand(std::shared_ptr<TaskRunner> runner)
      : runner_(std::move(runner)) {}
  class Turn;

  bool Schedule();
  void RunSome();
  void DropAll();

  const std::shared_ptr<TaskRunner> runner_;
  base::Mutex mutex_;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  bool scheduled_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace kvasir::router
