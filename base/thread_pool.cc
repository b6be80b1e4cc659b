#include "base/thread_pool.h"

#include <chrono>
#include <optional>

#include "base/check.h"

namespace kvasir::base {
namespace {

// How long a waiting thread spins before it sleeps. This is longer than the
// gaps between the launches of one decode step, because waking a thread would
// delay a launch. (With 10 us, decode of a 1.1B model on 2 cores reached 0.78
// of the memory's read bandwidth, with 100 us 0.82.) It is much shorter than a
// step, so that idle threads soon free their cores.
constexpr std::chrono::microseconds kSpinTime(100);
// Waiting threads read the clock only after this many pause instructions. A
// pause and a reading of the clock take 5 to 50 ns each, depending on the CPU.
constexpr int kPausesPerClockReading = 32;

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until `value` differs from `old`, and returns the new value.
uint32_t AwaitChange(const std::atomic<uint32_t>& value, uint32_t old) {
  using Clock = std::chrono::steady_clock;
  std::optional<Clock::time_point> end;
  do {
    for (int i = 0; i < kPausesPerClockReading; ++i) {
      const uint32_t now = value.load(std::memory_order_acquire);
      if (now != old) return now;
      Pause();
    }
    if (!end.has_value()) end = Clock::now() + kSpinTime;
  } while (Clock::now() < *end);
  value.wait(old, std::memory_order_acquire);
  return value.load(std::memory_order_acquire);
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads) {
  KVASIR_CHECK(num_threads >= 1);
  threads_.reserve(static_cast<size_t>(num_threads - 1));
  for (int t = 1; t < num_threads; ++t) {
    threads_.emplace_back([this, t] { WorkerLoop(t); });
  }
}

ThreadPool::~ThreadPool() {
  stopping_.store(true, std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::WorkerLoop(int thread) {
  uint32_t seen = 0;
  while (true) {
    seen = AwaitChange(epoch_, seen);
    if (stopping_.load(std::memory_order_relaxed)) return;
    (*function_)(thread);
    if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      running_.notify_one();
    }
  }
}

void ThreadPool::Run(absl::FunctionRef<void(int)> function) {
  if (num_threads_ == 1) {
    MutexLock lock(&run_mutex_);
    function(0);
    return;
  }
  MutexLock lock(&run_mutex_);
  function_ = &function;
  running_.store(static_cast<uint32_t>(num_threads_ - 1),
                 std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  function(0);
  for (uint32_t left = running_.load(std::memory_order_acquire); left != 0;) {
    left = AwaitChange(running_, left);
  }
  function_ = nullptr;
}

void ThreadPool::ForRanges(
    int64_t count, absl::FunctionRef<void(int64_t, int64_t, int)> function) {
  if (count <= 0) return;
  if (count == 1 || num_threads_ == 1) {
    function(0, count, 0);
    return;
  }
  Run([&](int thread) {
    const int64_t begin = count * thread / num_threads_;
    const int64_t end = count * (thread + 1) / num_threads_;
    if (begin < end) function(begin, end, thread);
  });
}

}  // namespace kvasir::base
