// Drains a worker: it accepts no new requests and waits for those it has.
// Requests that have not ended at the deadline are refused, so that a router
// can try them elsewhere.
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

// Owns: one thread, after the first Start.
// Threads: any thread. `before` and `done` are called without a lock. `done` is
//   called on the drainer's thread, or on the caller's if the drain has already
//   ended.
class Drainer {
 public:
  using Done = std::function<void(const kvasir::v1::DrainResponse&)>;

  // `before` is called once, before the engine refuses new requests; it should
  // report NOT_SERVING. `engine` must outlive the drainer.
  Drainer(ServedEngine* engine, std::function<void()> before)
      : engine_(engine), before_(std::move(before)) {}
  ~Drainer() { Stop(); }

  // Begins a drain, or joins the running one; then the earliest of all
  // deadlines applies. `done` is called when the drain has ended.
  void Start(absl::Time deadline, Done done) ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends a running drain as if its deadline had passed, and calls every `done`.
  // For each later Start, `done` is called at once. Idempotent.
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
