// A mutex and a condition variable of the standard library with Abseil's thread
// annotations, which Clang's -Wthread-safety checks. absl::Mutex is not used,
// because Debian's build of it gives false reports under ThreadSanitizer.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"

namespace kvasir::base {

// GCC and Clang report ThreadSanitizer in different ways.
#if defined(__SANITIZE_THREAD__)
#define KVASIR_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define KVASIR_TSAN 1
#endif
#endif

class ABSL_LOCKABLE Mutex {
 public:
  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() { mutex_.lock(); }
  void Unlock() ABSL_UNLOCK_FUNCTION() { mutex_.unlock(); }

 private:
  friend class CondVar;
  std::mutex mutex_;
};

class ABSL_SCOPED_LOCKABLE MutexLock {
 public:
  explicit MutexLock(Mutex* mutex) ABSL_EXCLUSIVE_LOCK_FUNCTION(mutex)
      : mutex_(mutex) {
    mutex_->Lock();
  }
  ~MutexLock() ABSL_UNLOCK_FUNCTION() { mutex_->Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex* mutex_;
};

class CondVar {
 public:
  // The clock of timed waits. It is steady, so that changes of the wall clock
  // neither delay nor end a wait. Builds with ThreadSanitizer use the system
  // clock, because this toolchain's ThreadSanitizer does not support waits with
  // a steady clock (pthread_cond_clockwait).
#if defined(KVASIR_TSAN)
  using WaitClock = std::chrono::system_clock;
#else
  using WaitClock = std::chrono::steady_clock;
#endif
  // Longer timeouts are cut to this one, so that the current time plus the
  // timeout does not overflow.
  static constexpr absl::Duration kLongestWait = absl::Hours(24 * 365);

  void Wait(Mutex* mutex) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    std::unique_lock<std::mutex> lock(mutex->mutex_, std::adopt_lock);
    condition_.wait(lock);
    lock.release();
  }

  // Returns true if `timeout` (at most kLongestWait) has passed without
  // a signal.
  bool WaitWithTimeout(Mutex* mutex, absl::Duration timeout)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    std::unique_lock<std::mutex> lock(mutex->mutex_, std::adopt_lock);
    const auto deadline =
        WaitClock::now() +
        std::chrono::duration_cast<WaitClock::duration>(
            absl::ToChronoNanoseconds(
                std::clamp(timeout, absl::ZeroDuration(), kLongestWait)));
    const bool timed_out =
        condition_.wait_until(lock, deadline) == std::cv_status::timeout;
    lock.release();
    return timed_out;
  }

  void Signal() { condition_.notify_one(); }
  void SignalAll() { condition_.notify_all(); }

 private:
  std::condition_variable condition_;
};

}  // namespace kvasir::base
