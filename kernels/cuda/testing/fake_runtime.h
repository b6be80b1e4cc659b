// A CUDA runtime for tests without a GPU. Enqueued work runs only when a caller
// waits for it, so code that reuses memory too early reads or writes wrong
// bytes.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "kernels/cuda/runtime.h"
#include "kernels/device/host_work.h"

namespace kvasir::kernels::cuda {

struct FakeLaunch {
  KernelLaunch launch;
  std::vector<char> args;  // as they were when the launch was enqueued
};

// Reports the properties of an H100. Device memory is memory of the test's
// process, with sizes rounded up as cudaMalloc does. The test fails if a copy's
// host side is not pinned, if work uses a stream or memory of another device,
// or if memory is freed that a copy still needs. The fake refuses calls during
// a capture, and invalidates the capture, as CUDA does; that does not fail the
// test. launches() does not list a graph's launches again.
class FakeRuntime final : public Runtime {
 public:
  ~FakeRuntime() override;

  // Set these before the device is made.
  int driver_version = 13000;
  int device_count = 1;
  DeviceProperties properties = {.name = "Fake GPU",
                                 .major = 9,
                                 .minor = 0,
                                 .multiprocessors = 7,
                                 .memory_bytes = int64_t{1} << 30,
                                 .l2_bytes = 1 << 20,
                                 .shared_bytes = 227 << 10};
  size_t total_bytes = size_t{1} << 30;
  size_t context_bytes = size_t{100} << 20;
  // Device memory that the first launch takes, because CUDA then loads code and
  // allocates stacks.
  size_t code_bytes = 0;
  static constexpr size_t kRoundedTo = size_t{2} << 20;

  // The next call of this name, such as "CopyAsync", fails once.
  void FailNext(const std::string& call, Result result);
  // Simulates a kernel that failed: from now on, every call that can report it
  // returns `result`, and no enqueued work runs.
  void Break(Result result);
  // Memory that is still allocated at the end does not fail the test.
  void AllowLeaks();
  // Sets the function that a launch calls when the stream runs it.
  void OnRun(std::function<void(const KernelLaunch&)> run);

  // Enqueues work that is not a kernel, as libraries do.
  void Enqueue(StreamHandle stream, std::function<void()> run);
  // True if [at, at + bytes) is within one allocation of device memory.
  bool IsDeviceMemory(const void* at, size_t bytes) const;

  std::vector<FakeLaunch> launches() const;  // in the order of the calls
  int64_t calls(const std::string& call) const;
  size_t pinned_bytes() const;
  // The device that the calling thread uses.
  int device_in_use() const;
  // Number of pieces of work on all streams that have not run yet.
  size_t waiting() const;

  std::string Describe(Result result) override;
  Result DriverVersion(int* version) override;
  int RuntimeVersion() override { return 13000; }
  Result DeviceCount(int* count) override;
  Result Properties(int device, DeviceProperties* found) override;
  Result Use(int device) override;
  Result MemoryInfo(size_t* free_bytes, size_t* total) override;
  Result Allocate(void** memory, size_t bytes) override;
  Result Free(void* memory) override;
  Result AllocateHost(void** memory, size_t bytes) override;
  Result FreeHost(void* memory) override;
  Result MakeStream(StreamHandle* stream) override;
  Result DestroyStream(StreamHandle stream) override;
  Result SynchronizeStream(StreamHandle stream) override;
  Result SynchronizeDevice() override;
  Result MakeEvent(EventHandle* event) override;
  Result DestroyEvent(EventHandle event) override;
  Result RecordEvent(EventHandle event, StreamHandle stream) override;
  Result WaitForEvent(EventHandle event) override;
  Result QueryEvent(EventHandle event, bool* over) override;
  Result CopyAsync(void* to, const void* from, size_t bytes,
                   StreamHandle stream) override;
  Result BeginCapture(StreamHandle stream) override;
  Result EndCapture(StreamHandle stream, GraphHandle* graph) override;
  Result DestroyGraph(GraphHandle graph) override;
  Result InstantiateGraph(GraphHandle graph, StreamHandle stream,
                          ExecHandle* exec) override;
  Result DestroyExec(ExecHandle exec) override;
  Result LaunchGraph(ExecHandle exec, StreamHandle stream) override;
  Result AllowSharedBytes(const void* function, uint32_t bytes) override;
  Result Launch(const KernelLaunch& launch, StreamHandle stream) override;

 private:
  struct Work {
    std::function<void()> run;
    EventHandle event = nullptr;
    // Addresses that must stay allocated until the work has run.
    const void* to = nullptr;
    const void* from = nullptr;
    ExecHandle exec = nullptr;  // the graph that the work is part of
  };
  using Graph = std::shared_ptr<const std::vector<Work>>;
  struct Capture {
    std::thread::id thread;
    std::vector<Work> work;
    bool spoiled = false;
  };
  // The stream's handle is its HostWork.
  struct Stream : HostWork {
    FakeRuntime* runtime = nullptr;
    int device = 0;
    // The first one is running, until it is done.
    std::deque<Work> work;
    bool running = false;
    std::optional<Capture> capture;
  };
  struct Event {
    StreamHandle stream = nullptr;  // of the last record
    Stream* captured_by = nullptr;
  };
  struct GiveBack {
    void operator()(char* memory) const;
  };
  struct Block {
    std::unique_ptr<char, GiveBack> memory;  // aligned as CUDA aligns
    size_t bytes = 0;
    int device = 0;
  };
  using Memory = std::map<const char*, Block>;

  // Counts the call; returns the error that FailNext set for it.
  Result Begin(const std::string& call) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  template <typename Handle>
  Handle NewHandle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return reinterpret_cast<Handle>(&handles_.emplace_back());
  }
  // Adds work to the stream, or to its capture.
  Result Add(StreamHandle stream, Work work)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns an error and invalidates the capture if a capture of this thread,
  // or of any thread, does not allow the call.
  Result RefuseCaptures(bool of_any_thread)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static Result Spoil(Stream* stream);
  static bool Waits(EventHandle event, const Stream& stream);
  // Runs the stream's work up to the event's last record, or all of it.
  // Releases the lock while work runs, because the work may wait for other
  // threads that query events.
  void RunUpTo(EventHandle event, Stream* stream)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `own`: the stream must belong to the device that the thread uses.
  Stream* Find(StreamHandle stream, bool own = true)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void* Take(Memory* from, size_t bytes);
  static bool Holds(const Memory& memory, const void* at, size_t bytes);
  // True if the bytes are in memory of the device that the thread uses.
  bool HoldsHere(const void* at, size_t bytes) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  size_t Held() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Result Give(Memory* from, void* memory) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable base::Mutex mutex_;
  std::map<std::string, Result> failures_ ABSL_GUARDED_BY(mutex_);
  Result broken_ ABSL_GUARDED_BY(mutex_) = Result::kOk;
  bool leaks_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<std::string, int64_t> calls_ ABSL_GUARDED_BY(mutex_);
  std::map<const void*, uint32_t> shared_ ABSL_GUARDED_BY(mutex_);
  Memory device_memory_ ABSL_GUARDED_BY(mutex_);
  Memory pinned_ ABSL_GUARDED_BY(mutex_);
  std::map<StreamHandle, std::shared_ptr<Stream>> streams_
      ABSL_GUARDED_BY(mutex_);
  base::CondVar idle_;  // signals that a stream is idle
  std::map<EventHandle, Event> events_ ABSL_GUARDED_BY(mutex_);
  std::map<GraphHandle, Graph> graphs_ ABSL_GUARDED_BY(mutex_);
  std::map<ExecHandle, Graph> execs_ ABSL_GUARDED_BY(mutex_);
  // handles are addresses of these elements
  std::deque<char> handles_ ABSL_GUARDED_BY(mutex_);
  std::vector<FakeLaunch> launches_ ABSL_GUARDED_BY(mutex_);
  std::function<void(const KernelLaunch&)> run_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvasir::kernels::cuda
