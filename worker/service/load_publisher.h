// Reports the engine's load to routers: the first report at once, then after
// each change but no more often than the router asked for. A heartbeat shows
// that the worker lives.
#pragma once

#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "worker/engine/engine_events.h"

namespace kvasir::worker {

// Computes when a watcher's next report is due. Plain data without a clock.
class LoadSchedule {
 public:
  LoadSchedule(absl::Duration min_interval, absl::Duration heartbeat)
      : min_interval_(min_interval), heartbeat_(heartbeat) {}

  // The report is due at this time. A change of `draining` is due at once.
  absl::Time NextDue(const LoadSnapshot& load) const;
  void Sent(absl::Time now, const LoadSnapshot& load);
  // Whether the last report had this load, so that only a heartbeat is due.
  bool UpToDate(const LoadSnapshot& load) const { return last_ == load; }

 private:
  absl::Duration min_interval_;
  absl::Duration heartbeat_;
  std::optional<LoadSnapshot> last_;
  absl::Time last_time_ = absl::InfinitePast();
};

// Threads: the publisher's thread makes the calls, without a lock. A call must
//   not block.
class LoadWatcher {
 public:
  virtual ~LoadWatcher() = default;
  virtual void OnReport(const LoadSnapshot& load) = 0;
  // The last call to the watcher. The worker shuts down.
  virtual void OnClosed() = 0;
};

// Owns: its thread.
// Threads: any thread.
class LoadPublisher final : public LoadListener {
 public:
  explicit LoadPublisher(absl::Duration heartbeat);
  ~LoadPublisher() override;

  void OnLoad(const LoadSnapshot& load) override ABSL_LOCKS_EXCLUDED(mutex_);
  // Reports to `watcher` until it is destroyed.
  void Watch(std::weak_ptr<LoadWatcher> watcher, absl::Duration min_interval)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Closes every watcher, and each later one at once. Idempotent.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Entry {
    std::weak_ptr<LoadWatcher> watcher;
    LoadSchedule schedule;
  };

  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  // The watchers that are due a report. `next` is when the next one is due.
  std::vector<std::shared_ptr<LoadWatcher>> TakeDue(absl::Time* next)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const absl::Duration heartbeat_;
  base::Mutex mutex_;
  base::CondVar wake_;
  LoadSnapshot load_ ABSL_GUARDED_BY(mutex_);
  std::vector<Entry> entries_ ABSL_GUARDED_BY(mutex_);
  // Whether the next change must wake the thread, because the last report to
  // some watcher is up to date.
  bool wake_on_change_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace kvasir::worker
