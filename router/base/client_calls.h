// Counts the open calls of all facades' clients. A drain waits until no call
// is open.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"

namespace kvasir::router {

// The counter, which all facades share.
// Threads: its methods may be called from any thread.
class ClientCalls {
 public:
  explicit ClientCalls(const base::Clock* clock = &base::Clock::Real())
      : clock_(clock) {}

  size_t open() const ABSL_LOCKS_EXCLUDED(mutex_) {
    base::MutexLock lock(&mutex_);
    return open_;
  }
  // True if no call is open, and none has begun or ended for `duration`.
  bool QuietFor(absl::Duration duration) const ABSL_LOCKS_EXCLUDED(mutex_) {
    base::MutexLock lock(&mutex_);
    return open_ == 0 && clock_->Now() - changed_at_ >= duration;
  }

 private:
  friend class ClientCall;
  void Change(int by) ABSL_LOCKS_EXCLUDED(mutex_) {
    base::MutexLock lock(&mutex_);
    open_ += static_cast<size_t>(by);
    changed_at_ = clock_->Now();
  }

  const base::Clock* const clock_;
  mutable base::Mutex mutex_;
  size_t open_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Time changed_at_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
};

// An open call: it counts from its construction to its destruction. The reactor
// of each gRPC call has one as a member.
class ClientCall {
 public:
  explicit ClientCall(std::shared_ptr<ClientCalls> calls)
      : calls_(std::move(calls)) {
    calls_->Change(1);
  }
  ~ClientCall() { calls_->Change(-1); }
  ClientCall(const ClientCall&) = delete;
  ClientCall& operator=(const ClientCall&) = delete;

 private:
  const std::shared_ptr<ClientCalls> calls_;
};

}  // namespace kvasir::router
