// Empties a worker: stop admission, wait for what runs, refuse the rest at the
// deadline (so that a router may try elsewhere), report.
#pragma once

#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "proto/kvasir/v1/worker.pb.h"
#include "worker/engine/served_engine.h"

namespace kvasir::worker {

// Owns: one thread, from the first Start on.
// Threads: any thread. `before` and `done` run without a lock, `done` on the
// drainer's thread.
class Drainer {
 public:
  using Done = std::function<void(const kvasir::v1::DrainResponse&)>;

  // `before` runs once, ahead of everything: turn NOT_SERVING. `engine`
  // outlives it.
  Drainer(ServedEngine* engine, std::function<void()> before)
      : engine_(engine), before_(std::move(before)) {}
  ~Drainer() { Stop(); }

  // Begins to drain, or joins the drain that runs: the earliest deadline
  // counts.
  void Start(absl::Time deadline, Done done) ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends a drain that runs as if its deadline had come; answers whoever waits,
  // and later callers at once. Idempotent.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  bool WaitIdle() ABSL_LOCKS_EXCLUDED(mutex_);
  void Answer(const kvasir::v1::DrainResponse& response)
      ABSL_LOCKS_EXCLUDED(mutex_);

  ServedEngine* const engine_;
  const std::function<void()> before_;
  base::Mutex mutex_;
  absl::Time deadline_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  std::vector<Done> waiting_ ABSL_GUARDED_BY(mutex_);
  bool drained_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  kvasir::v1::DrainResponse response_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvasir::worker
