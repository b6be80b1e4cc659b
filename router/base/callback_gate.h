// Lets an object be destroyed safely while callbacks may still want to use it.
// A callback enters the gate before it uses the object, and leaves it
// afterwards. The object closes the gate before it is destroyed. This waits for
// the callbacks inside, and later ones cannot enter.
#pragma once

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace kvasir::router {

// The object and every callback hold the gate by shared_ptr, so that it
// outlives the object.
// Threads: its methods may be called from any thread, but a callback inside the
// gate must not call Close.
class CallbackGate {
 public:
  // Returns true if the callback may use the object until it calls Leave.
  // Returns false if the gate is closed, because the object may be gone then.
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
  // From now on no callback can enter. Does not wait for callbacks inside.
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
