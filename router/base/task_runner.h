// Threads for the work of facades: a small pool, and strands that use it. Each
// strand runs its tasks one at a time and in order. gRPC's own threads do not
// run this work, because they are few and handle the events of all calls.
#pragma once

#include <cstddef>
#include <deque>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "base/mutex.h"

namespace kvasir::router {

using Task = absl::AnyInvocable<void()>;

// Runs posted tasks on other threads.
// Threads: its methods may be called from any thread.
class TaskRunner {
 public:
  virtual ~TaskRunner() = default;
  // Queues the task. Returns false if the task was dropped because the queue is
  // full or the threads have ended.
  virtual bool Post(Task task) = 0;
  // Like Post, but a runner with a queue takes the tasks of different `turn`s
  // alternately. If each client has its own `turn`, many tasks of one client
  // delay another client by only one task. Tasks of one `turn` stay in order.
  virtual bool PostInTurn(const std::string& /*turn*/, Task task) {
    return Post(std::move(task));
  }
};

// A fixed number of threads and a queue, from which they take tasks of
// different turns alternately. Post uses the turn "". One turn cannot fill
// the queue: a task is refused if its turn already has as many tasks in the
// queue as places are free. The destructor drops tasks that have not begun
// and joins the threads. runner() may outlive the pool and then refuses
// tasks. Owns: its threads.
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

// Runs its tasks one at a time and in order, on another runner. The strand has
// at most one task in that runner's queue, however many of its own tasks wait.
// If the runner refuses or drops that task, the strand drops all its tasks.
// Otherwise a task that refers to the strand would keep it alive forever.
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
