// The process's compute threads. They run parallel loops, which are split into
// one part per thread. A launch (one parallel loop) costs a few microseconds if
// launches follow each other closely.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "base/mutex.h"

namespace kvasir::base {

// Runs one function on all its threads at a time; the caller is thread 0.
// Waiting threads spin for about 100 microseconds and then sleep, because other
// processes share the cores.
//
// Owns: num_threads - 1 threads, joined by the destructor.
// Threads: Run may be called from any thread; calls are served one after the
//   other. A function that runs on the pool must not call Run on it.
class ThreadPool {
 public:
  // num_threads >= 1 and includes the caller's thread.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }

  // Calls function(thread) for each thread in [0, num_threads) and returns
  // when all are done. Allocates nothing.
  void Run(absl::FunctionRef<void(int thread)> function);

  // Splits [0, count) into num_threads contiguous ranges, whose lengths differ
  // by at most one. Calls function(begin, end, thread) for each range that is
  // not empty. If count < 2, only the caller's thread runs.
  void ForRanges(
      int64_t count,
      absl::FunctionRef<void(int64_t begin, int64_t end, int thread)> function);

 private:
  void WorkerLoop(int thread);

  // Constant after construction.
  const int num_threads_;
  std::vector<std::thread> threads_;

  // Held during Run, so that only one Run executes at a time.
  Mutex run_mutex_;

  // Synchronization between Run and the workers: a launch publishes
  // function_ by incrementing epoch_, and a worker's last action is to
  // decrement running_.
  std::atomic<uint32_t> epoch_{0};
  std::atomic<uint32_t> running_{0};
  std::atomic<bool> stopping_{false};
  const absl::FunctionRef<void(int)>* function_ = nullptr;
};

}  // namespace kvasir::base
