#include "router/base/timer_thread.h"

#include "base/clock.h"

namespace kvasir::router {

TimerThread::TimerThread() : thread_([this] { Run(); }) {}

TimerThread::~TimerThread() { Stop(); }

TimerThread::TimerId TimerThread::At(absl::Time when, Task task) {
  base::MutexLock lock(&mutex_);
  const TimerId id{when, next_id_++};
  if (stopping_) return id;
  const auto added = tasks_.emplace(id, std::move(task)).first;
  if (added == tasks_.begin()) wake_.Signal();
  return id;
}

bool TimerThread::Cancel(const TimerId& id) {
  Task dropped;
  base::MutexLock lock(&mutex_);
  const auto found = tasks_.find(id);
  if (found == tasks_.end()) return false;
  dropped = std::move(found->second);
  tasks_.erase(found);
  return true;
}

void TimerThread::Stop() {
  std::map<TimerId, Task> dropped;
  {
    base::MutexLock lock(&mutex_);
    stopping_ = true;
    dropped.swap(tasks_);
    wake_.Signal();
  }
  if (thread_.joinable()) thread_.join();
}

void TimerThread::Run() {
  while (true) {
    Task task;
    {
      base::MutexLock lock(&mutex_);
      if (stopping_) return;
      const absl::Time now = base::Clock::Real().Now();
      if (tasks_.empty() || tasks_.begin()->first.first > now) {
        if (tasks_.empty() ||
            tasks_.begin()->first.first == absl::InfiniteFuture()) {
          wake_.Wait(&mutex_);
        } else {
          wake_.WaitWithTimeout(&mutex_, tasks_.begin()->first.first - now);
        }
        continue;
      }
      task = std::move(tasks_.begin()->second);
      tasks_.erase(tasks_.begin());
    }
    task();
  }
}

}  // namespace kvasir::router
