// Runs short tasks at given times on its own thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "base/mutex.h"

namespace kvasir::router {

// A thread with a queue of timed tasks.
// Owns: its thread.
// Threads: its methods may be called from any thread, but a task must not
// call Stop.
class TimerThread {
 public:
  using Task = std::function<void()>;
  using TimerId = std::pair<absl::Time, uint64_t>;

  TimerThread();
  ~TimerThread();

  // Runs `task` at the time `when`, or as soon as possible if that time has
  // passed. Tasks with the same time run in the order in which they were added.
  TimerId At(absl::Time when, Task task) ABSL_LOCKS_EXCLUDED(mutex_);
  // Removes a task that has not begun to run. Returns false if the task has
  // run, is running, or never existed.
  bool Cancel(const TimerId& id) ABSL_LOCKS_EXCLUDED(mutex_);
  // Drops tasks that have not begun, waits for a running one, and ends the
  // thread. May be called again.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);

  base::Mutex mutex_;
  base::CondVar wake_;
  std::map<TimerId, Task> tasks_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_id_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace kvasir::router
