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

// Owns: its thread.
// Threads: any thread; Stop not from a task.
class TimerThread {
 public:
  using Task = std::function<void()>;
  using TimerId = std::pair<absl::Time, uint64_t>;

  TimerThread();
  ~TimerThread();

  // Tasks of equal time run in the order in which they were added. A time in
  // the past means as soon as possible.
  TimerId At(absl::Time when, Task task) ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns false if the task has run, is running, or never existed.
  bool Cancel(const TimerId& id) ABSL_LOCKS_EXCLUDED(mutex_);
  // Drops tasks that have not run, and returns when none runs any more.
  // Idempotent.
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
