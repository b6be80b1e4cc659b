// Allows an object to be destroyed while callbacks into it are still
// outstanding. Each callback passes the gate first, and closing the gate waits
// for those inside.
#pragma once

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace kvasir::router {

// Held in a shared_ptr by the object and by every callback.
// Threads: any thread; Close not from inside the gate.
class CallbackGate {
 public:
  // Returns false once the gate is closed: the object may be gone. After true
  // the object exists until Leave.
  bool Enter() ABSL_LOCKS_EXCLUDED(mutex_) {
    base::MutexLock lock(&mutex_);
    if (closed_) return false;
    ++inside_;
    return true;
  }
  void Leave() ABSL_LOCKS_EXCLUDED(mutex_) {
    base::MutexLock lock(&mutex_);
    if (--inside_ == 0) empty_.SignalAll();
  }
  // No callback enters from now on.
  void Shut() ABSL_LOCKS_EXCLUDED(mutex_) {
    base::MutexLock lock(&mutex_);
    closed_ = true;
  }
  // Shuts the gate and waits until no callback is inside.
  void Close() ABSL_LOCKS_EXCLUDED(mutex_) {
    base::MutexLock lock(&mutex_);
    closed_ = true;
    while (inside_ > 0) empty_.Wait(&mutex_);
  }

 private:
  base::Mutex mutex_;
  base::CondVar empty_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  int inside_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace kvasir::router
