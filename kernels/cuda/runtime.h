// Runtime: an interface to the functions of CUDA's runtime that the back end
// calls. Tests without a GPU implement it by a fake.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/device/launcher.h"

namespace kvasir::kernels::cuda {

// A cudaError_t as a number. The errors that our code checks for have names.
enum class Result : int {
  kOk = 0,
  kOutOfMemory = 2,
  kOldDriver = 35,
  kNoDevice = 100,
  kNoImage = 209,  // the program has no code for this GPU
  kIllegalState = 401,
  kCaptureUnsupported = 900,  // not allowed while a stream captures
  // A call that is not allowed during a capture has made the capture invalid.
  kCaptureInvalidated = 901,
  kCapturedEvent = 907,
  kCaptureWrongThread = 908,
};

struct DeviceProperties {
  std::string name;  // for example "NVIDIA H100 80GB HBM3"
  int major = 0;     // major number of the compute capability
  int minor = 0;
  int multiprocessors = 0;
  int64_t memory_bytes = 0;
  int64_t l2_bytes = 0;
  // The most shared memory that a CTA can have. A kernel that needs more than
  // kPlainSharedBytes must be allowed to use it by AllowSharedBytes.
  int64_t shared_bytes = 0;
};

// Bytes of dynamic shared memory that every kernel may use without
// AllowSharedBytes.
inline constexpr uint32_t kPlainSharedBytes = 48 * 1024;

using StreamHandle = struct StreamTag*;
using EventHandle = struct EventTag*;
using GraphHandle = struct GraphTag*;
using ExecHandle = struct ExecTag*;

// Threads: all methods may be called from any thread. They use the device that
// the calling thread has passed to Use() last.
class Runtime {
 public:
  virtual ~Runtime() = default;

  // The name, number and text of an error, for example
  // "cudaErrorMemoryAllocation (2): out of memory".
  virtual std::string Describe(Result result) = 0;
  // Both functions return CUDA versions as 1000 * major + 10 * minor.
  // DriverVersion: the newest version that the driver supports, 0 without a
  // driver. RuntimeVersion: the version of this runtime.
  virtual Result DriverVersion(int* version) = 0;
  virtual int RuntimeVersion() = 0;
  virtual Result DeviceCount(int* count) = 0;
  virtual Result Properties(int device, DeviceProperties* properties) = 0;

  virtual Result Use(int device) = 0;

  virtual Result MemoryInfo(size_t* free_bytes, size_t* total_bytes) = 0;
  // Allocates device memory, aligned to 256 bytes.
  virtual Result Allocate(void** memory, size_t bytes) = 0;
  virtual Result Free(void* memory) = 0;
  // Allocates pinned host memory: copies from and to it are asynchronous, and
  // kernels can access the memory by the same address.
  virtual Result AllocateHost(void** memory, size_t bytes) = 0;
  virtual Result FreeHost(void* memory) = 0;

  // Makes a stream. Its work and the work on CUDA's default stream do not wait
  // for each other.
  virtual Result MakeStream(StreamHandle* stream) = 0;
  virtual Result DestroyStream(StreamHandle stream) = 0;
  virtual Result SynchronizeStream(StreamHandle stream) = 0;
  virtual Result SynchronizeDevice() = 0;

  // Makes an event. The event is over after the stream has done all work that
  // was enqueued before the event's last RecordEvent.
  virtual Result MakeEvent(EventHandle* event) = 0;
  virtual Result DestroyEvent(EventHandle event) = 0;
  virtual Result RecordEvent(EventHandle event, StreamHandle stream) = 0;
  virtual Result WaitForEvent(EventHandle event) = 0;
  // Sets `over` to whether the event is over. The event may belong to any
  // device.
  virtual Result QueryEvent(EventHandle event, bool* over) = 0;

  // Enqueues a copy between device memory and pinned memory, in either
  // direction. Both must stay allocated until the stream has run the copy.
  virtual Result CopyAsync(void* to, const void* from, size_t bytes,
                           StreamHandle stream) = 0;
  // From now on, work that is enqueued on the stream becomes part of a graph
  // and does not run. Calls that a capture cannot contain, such as waiting for
  // the stream or allocating memory from this thread, are refused and
  // invalidate the capture.
  virtual Result BeginCapture(StreamHandle stream) = 0;
  // Must be called by the thread that called BeginCapture. Ends the capture
  // even if it has failed, and sets `graph` if it has not.
  virtual Result EndCapture(StreamHandle stream, GraphHandle* graph) = 0;
  virtual Result DestroyGraph(GraphHandle graph) = 0;
  // Makes an executable graph from `graph`, which may be destroyed afterwards.
  // Also uploads the executable graph on `stream`, which allocates the device
  // memory that the graph needs. So LaunchGraph allocates nothing.
  virtual Result InstantiateGraph(GraphHandle graph, StreamHandle stream,
                                  ExecHandle* exec) = 0;
  // Destroys an executable graph, which must not be running.
  virtual Result DestroyExec(ExecHandle exec) = 0;
  virtual Result LaunchGraph(ExecHandle exec, StreamHandle stream) = 0;
  // Allows `function` to be launched with up to `bytes` of dynamic shared
  // memory.
  virtual Result AllowSharedBytes(const void* function, uint32_t bytes) = 0;
  // Enqueues a kernel. If launch.ctas_together is set, the launch is refused
  // unless all CTAs can be resident at the same time. After a refused launch,
  // later calls do not return its error again.
  virtual Result Launch(const KernelLaunch& launch, StreamHandle stream) = 0;
};

}  // namespace kvasir::kernels::cuda
