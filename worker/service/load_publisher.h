// Tells routers about the engine's load: at once, when it changes (no more
// often than each asked for), and as a heartbeat that shows the worker lives.
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

// When one watcher is due its next report. Plain data, no clock of its own.
class LoadSchedule {
 public:
  LoadSchedule(absl::Duration min_interval, absl::Duration heartbeat)
      : min_interval_(min_interval), heartbeat_(heartbeat) {}

  // In the past or now: send. A drain is told without waiting.
  absl::Time NextDue(const LoadSnapshot& load) const;
  void Sent(absl::Time now, const LoadSnapshot& load);
  // Nothing to tell but the heartbeat.
  bool UpToDate(const LoadSnapshot& load) const { return last_ == load; }

 private:
  absl::Duration min_interval_;
  absl::Duration heartbeat_;
  std::optional<LoadSnapshot> last_;
  absl::Time last_time_ = absl::InfinitePast();
};

// Threads: the publisher's thread calls, no lock held. Must not block.
class LoadWatcher {
 public:
  virtual ~LoadWatcher() = default;
  virtual void OnReport(const LoadSnapshot& load) = 0;
  // Last call: the worker is going away.
  virtual void OnClosed() = 0;
};

// Owns: its thread.
// Threads: any thread.
class LoadPublisher final : public LoadListener {
 public:
  explicit LoadPublisher(absl::Duration heartbeat);
  ~LoadPublisher() override;

  void OnLoad(const LoadSnapshot& load) override ABSL_LOCKS_EXCLUDED(mutex_);
  // A watcher that is destroyed is forgotten.
  void Watch(std::weak_ptr<LoadWatcher> watcher, absl::Duration min_interval)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Closes every watcher, later ones too. Idempotent.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Entry {
    std::weak_ptr<LoadWatcher> watcher;
    LoadSchedule schedule;
  };

  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  // Whom to tell now; when to look again.
  std::vector<std::shared_ptr<LoadWatcher>> TakeDue(absl::Time* next)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const absl::Duration heartbeat_;
  base::Mutex mutex_;
  base::CondVar wake_;
  LoadSnapshot load_ ABSL_GUARDED_BY(mutex_);
  std::vector<Entry> entries_ ABSL_GUARDED_BY(mutex_);
  // The next change must wake the thread: a watcher has nothing else to wait
  // for.
  bool wake_on_change_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace kvasir::worker
