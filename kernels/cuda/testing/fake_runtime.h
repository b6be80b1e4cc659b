// FakeRuntime: a CUDA runtime for tests without a GPU. Enqueued work runs only
// when a caller waits for it. So if code reuses memory too early, the work
// reads or writes wrong bytes and the test fails.
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
  // A copy of the kernel's parameters, made when the launch was enqueued.
  std::vector<char> args;
};

// Reports the properties of an H100. Device memory is ordinary memory of the
// test's process, with sizes rounded up as by cudaMalloc. The test fails if the
// host memory of a copy is not pinned, if work uses a stream or memory of
// another device, or if memory is freed that a copy still needs. Calls that
// CUDA does not allow during a capture are refused and invalidate the capture,
// as in CUDA; this does not fail the test. launches() lists a captured launch
// once, not again for each replay.
class FakeRuntime final : public Runtime {
 public:
  ~FakeRuntime() override;

  // Tests set these before they make the device.
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
  // How many bytes of device memory the code and stacks of kernels use from the
  // first launch on.
  size_t code_bytes = 0;
  static constexpr size_t kRoundedTo = size_t{2} << 20;

  // Makes the next call of the method of this name, such as "CopyAsync", fail
  // with `result`.
  void FailNext(const std::string& call, Result result);
  // Simulates a kernel that has failed: from now on, no enqueued work runs, and
  // every call that can report the failure returns `result`.
  void Break(Result result);
  // Lets the test pass even if memory is still allocated at its end.
  void AllowLeaks();
  // Sets the function that a launch calls when the stream runs it.
  void OnRun(std::function<void(const KernelLaunch&)> run);

  // Enqueues work that is not a kernel launch; fake libraries use this.
  void Enqueue(StreamHandle stream, std::function<void()> run);
  // True if [at, at + bytes) is within one allocation of device memory.
  bool IsDeviceMemory(const void* at, size_t bytes) const;

  std::vector<FakeLaunch> launches() const;  // in the order of the calls
  int64_t calls(const std::string& call) const;
  size_t pinned_bytes() const;
  // Returns the device that the calling thread has selected by Use().
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
    // The addresses of a copy, whose memory must stay allocated until the work
    // has run.
    const void* to = nullptr;
    const void* from = nullptr;
    // The launched graph to which this work belongs, or null.
    ExecHandle exec = nullptr;
  };
  using Graph = std::shared_ptr<const std::vector<Work>>;
  struct Capture {
    std::thread::id thread;
    std::vector<Work> work;
    bool spoiled = false;
  };
  // Streams derive from HostWork because fake libraries take a HostWork as the
  // stream's handle.
  struct Stream : HostWork {
    FakeRuntime* runtime = nullptr;
    int device = 0;
    // If `running`, the first piece of work is running; it is removed when it
    // is done.
    std::deque<Work> work;
    bool running = false;
    std::optional<Capture> capture;
  };
  struct Event {
    StreamHandle stream = nullptr;  // stream of the last RecordEvent
    Stream* captured_by = nullptr;
  };
  struct GiveBack {
    void operator()(char* memory) const;
  };
  struct Block {
    std::unique_ptr<char, GiveBack> memory;  // aligned like memory from CUDA
    size_t bytes = 0;
    int device = 0;
  };
  using Memory = std::map<const char*, Block>;

  // Counts the call of a method, and returns the error that FailNext or Break
  // has set for it.
  Result Begin(const std::string& call) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  template <typename Handle>
  Handle NewHandle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return reinterpret_cast<Handle>(&handles_.emplace_back());
  }
  // Enqueues work on the stream, or adds it to the stream's capture.
  Result Add(StreamHandle stream, Work work)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Must be called by methods that CUDA does not allow during a capture. If
  // this thread captures (or, if of_any_thread is set, any thread), invalidates
  // the capture and returns an error.
  Result RefuseCaptures(bool of_any_thread)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static Result Spoil(Stream* stream);
  static bool Waits(EventHandle event, const Stream& stream);
  // Runs the stream's work up to the last RecordEvent of `event`, or all work
  // if `event` is null. Unlocks the mutex while work runs, because the work may
  // wait for other threads that query events.
  void RunUpTo(EventHandle event, Stream* stream)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns the stream with this handle. If `own` is set, the test fails if the
  // stream does not belong to the device that the thread has selected.
  Stream* Find(StreamHandle stream, bool own = true)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void* Take(Memory* from, size_t bytes);
  static bool Holds(const Memory& memory, const void* at, size_t bytes);
  // True if the bytes are in memory of the device that the thread has selected.
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
  base::CondVar idle_;  // signaled when a stream becomes idle
  std::map<EventHandle, Event> events_ ABSL_GUARDED_BY(mutex_);
  std::map<GraphHandle, Graph> graphs_ ABSL_GUARDED_BY(mutex_);
  std::map<ExecHandle, Graph> execs_ ABSL_GUARDED_BY(mutex_);
  // Handles that are returned to callers are addresses of these elements.
  std::deque<char> handles_ ABSL_GUARDED_BY(mutex_);
  std::vector<FakeLaunch> launches_ ABSL_GUARDED_BY(mutex_);
  std::function<void(const KernelLaunch&)> run_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvasir::kernels::cuda
