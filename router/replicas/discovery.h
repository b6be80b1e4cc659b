// Looks workers up regularly, and gives the registry the list.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "router/base/callback_gate.h"
#include "router/base/timer_thread.h"
#include "router/replicas/membership.h"
#include "router/replicas/worker_source.h"

namespace kvasir::router {

// Owns: the sources. Each lookup has a detached thread of its own, so that a
//   slow resolver delays neither other sources nor the end of the process.
// Threads: one thread calls Start and the destructor. The functions of Options
//   run on the timer thread, and never after the destructor has returned.
class Discovery {
 public:
  struct Options {
    // The time from the end of a lookup to the next one.
    absl::Duration refresh = absl::Seconds(5);
    // Receives all workers after each lookup. `problems` is a text for people
    // about sources that could not be read or are empty.
    std::function<void(const std::vector<WorkerAddress>& workers,
                       const std::string& problems)>
        apply;
    // Returns whether the router is connected to a worker.
    std::function<bool(const std::string& target)> alive;
  };

  // `timers` must outlive this object.
  Discovery(WorkerList list, Options options, TimerThread* timers);
  ~Discovery();

  // Begins the lookups. Returns when each source has answered or failed once,
  // or after `patience`.
  void Start(absl::Duration patience) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Source;
  using Answer = absl::StatusOr<std::vector<WorkerAddress>>;

  // These run on the timer thread.
  void Look(Source* source);
  void OnAnswer(Source* source, const Answer& answer)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void Apply() const;

  const Options options_;
  TimerThread* const timers_;
  const std::vector<WorkerAddress> fixed_;
  std::vector<std::unique_ptr<Source>> sources_;  // for the timer thread
  const std::shared_ptr<CallbackGate> gate_ = std::make_shared<CallbackGate>();
  base::Mutex mutex_;
  base::CondVar changed_;
  size_t num_looked_up_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace kvasir::router
