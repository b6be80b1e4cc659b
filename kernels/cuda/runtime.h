// The calls of CUDA's runtime that the back end makes, behind an interface, so
// that tests without a GPU can use a runtime of their own.
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
  kCaptureInvalidated = 901,  // such a call invalidated the capture
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
  // The largest shared memory of one CTA. More than kPlainSharedBytes must be
  // allowed by AllowSharedBytes first.
  int64_t shared_bytes = 0;
};

// Dynamic shared memory that every kernel may have.
inline constexpr uint32_t kPlainSharedBytes = 48 * 1024;

using StreamHandle = struct StreamTag*;
using EventHandle = struct EventTag*;
using GraphHandle = struct GraphTag*;
using ExecHandle = struct ExecTag*;

// Threads: all methods may be called from any thread. They apply to the device
//   that the calling thread passed to Use last.
class Runtime {
 public:
  virtual ~Runtime() = default;

  // For example "cudaErrorMemoryAllocation (2): out of memory".
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

  // Makes a stream that does not synchronize with the default stream.
  virtual Result MakeStream(StreamHandle* stream) = 0;
  virtual Result DestroyStream(StreamHandle stream) = 0;
  virtual Result SynchronizeStream(StreamHandle stream) = 0;
  virtual Result SynchronizeDevice() = 0;

  // An event is over once the stream has done all work that preceded the last
  // RecordEvent.
  virtual Result MakeEvent(EventHandle* event) = 0;
  virtual Result DestroyEvent(EventHandle event) = 0;
  virtual Result RecordEvent(EventHandle event, StreamHandle stream) = 0;
  virtual Result WaitForEvent(EventHandle event) = 0;
  // Sets `over` if the event is over. Works for events of any device.
  virtual Result QueryEvent(EventHandle event, bool* over) = 0;

  // Copies between device memory and pinned memory, in either direction. Both
  // must stay until the stream has run the copy.
  virtual Result CopyAsync(void* to, const void* from, size_t bytes,
                           StreamHandle stream) = 0;
  // From now on, work that is enqueued on the stream becomes part of a graph
  // and does not run. CUDA refuses calls that a capture cannot contain, such as
  // waiting for the stream or allocating memory from this thread, and such a
  // call also invalidates the capture.
  virtual Result BeginCapture(StreamHandle stream) = 0;
  // Call it from the thread that called BeginCapture. The capture ends in any
  // case; if it failed, there is no graph.
  virtual Result EndCapture(StreamHandle stream, GraphHandle* graph) = 0;
  virtual Result DestroyGraph(GraphHandle graph) = 0;
  // Makes an executable graph; `graph` may then be destroyed. It allocates
  // device memory, in the order of the stream; a launch allocates no more.
  virtual Result InstantiateGraph(GraphHandle graph, StreamHandle stream,
                                  ExecHandle* exec) = 0;
  // The graph must not be running.
  virtual Result DestroyExec(ExecHandle exec) = 0;
  virtual Result LaunchGraph(ExecHandle exec, StreamHandle stream) = 0;
  // Allows `function` to be launched with this much dynamic shared memory.
  virtual Result AllowSharedBytes(const void* function, uint32_t bytes) = 0;
  // With ctas_together, the launch is refused if not all CTAs can be resident.
  // A refused launch leaves no error for later calls.
  virtual Result Launch(const KernelLaunch& launch, StreamHandle stream) = 0;
};

}  // namespace kvasir::kernels::cuda
