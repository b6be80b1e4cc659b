// Reports the engine's load to routers: once at the start, then after each
// change but not more often than the router asked for. Without changes the last
// report is repeated as a heartbeat, to show that the worker is alive.
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

// Computes when a watcher's next report is due. The caller passes in the time.
class LoadSchedule {
 public:
  LoadSchedule(absl::Duration min_interval, absl::Duration heartbeat)
      : min_interval_(min_interval), heartbeat_(heartbeat) {}

  // Returns when the next report is due if the load is `load`. If `draining`
  // has changed, the report is due at once.
  absl::Time NextDue(const LoadSnapshot& load) const;
  void Sent(absl::Time now, const LoadSnapshot& load);
  // Whether the last report had this load. If so, the next report is only a
  // heartbeat.
  bool UpToDate(const LoadSnapshot& load) const { return last_ == load; }

 private:
  absl::Duration min_interval_;
  absl::Duration heartbeat_;
  std::optional<LoadSnapshot> last_;
  absl::Time last_time_ = absl::InfinitePast();
};

// Receives load reports.
// Threads: the publisher's thread makes the calls, without a lock. A call must
//   not block.
class LoadWatcher {
 public:
  virtual ~LoadWatcher() = default;
  virtual void OnReport(const LoadSnapshot& load) = 0;
  // The worker shuts down. This is the last call to the watcher.
  virtual void OnClosed() = 0;
};

// Passes the load from the engine to all watchers.
// Owns: the thread that sends reports.
// Threads: any thread may call any method.
class LoadPublisher final : public LoadListener {
 public:
  explicit LoadPublisher(absl::Duration heartbeat);
  ~LoadPublisher() override;

  void OnLoad(const LoadSnapshot& load) override ABSL_LOCKS_EXCLUDED(mutex_);
  // Sends reports to `watcher`, at least `min_interval` apart, until the
  // watcher is destroyed.
  void Watch(std::weak_ptr<LoadWatcher> watcher, absl::Duration min_interval)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Calls OnClosed of every watcher. Watchers that are added later are closed
  // at once. Idempotent.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Entry {
    std::weak_ptr<LoadWatcher> watcher;
    LoadSchedule schedule;
  };

  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns the watchers to which a report is due now, and sets `next` to the
  // time when the next report is due.
  std::vector<std::shared_ptr<LoadWatcher>> TakeDue(absl::Time* next)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const absl::Duration heartbeat_;
  base::Mutex mutex_;
  base::CondVar wake_;
  LoadSnapshot load_ ABSL_GUARDED_BY(mutex_);
  std::vector<Entry> entries_ ABSL_GUARDED_BY(mutex_);
  // Whether a change of the load must wake the thread. True if some watcher
  // already has the present load, because then the thread sleeps until a
  // heartbeat is due.
  bool wake_on_change_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace kvasir::worker
