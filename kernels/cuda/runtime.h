// The calls of CUDA's runtime that the back end makes, behind an interface: its
// logic runs in tests where there is no GPU, over a runtime of theirs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/device/launcher.h"

namespace kvasir::kernels::cuda {

// A cudaError_t by its number. Those that somebody asks for have names.
enum class Result : int {
  kOk = 0,
  kOutOfMemory = 2,
  kOldDriver = 35,
  kNoDevice = 100,
  kNoImage = 209,  // no code for this device in the program
  kIllegalState = 401,
  kCaptureUnsupported = 900,  // not while a stream captures, which it spoils
  kCaptureInvalidated = 901,  // by such a call
  kCapturedEvent = 907,
  kCaptureWrongThread = 908,
};

struct DeviceProperties {
  std::string name;  // "NVIDIA H100 80GB HBM3"
  int major = 0;     // of the compute capability
  int minor = 0;
  int multiprocessors = 0;
  int64_t memory_bytes = 0;
  int64_t l2_bytes = 0;
  // Of one CTA, for kernels that were allowed more than kPlainSharedBytes.
  int64_t shared_bytes = 0;
};

// Dynamic shared memory that a kernel has without asking.
inline constexpr uint32_t kPlainSharedBytes = 48 * 1024;

using StreamHandle = struct StreamTag*;
using EventHandle = struct EventTag*;
using GraphHandle = struct GraphTag*;
using ExecHandle = struct ExecTag*;

// Threads: all methods may be called from any thread. What follows Use is done
//   on the device that the calling thread named there last.
// Errors: a call may return what asynchronous work before it failed with.
class Runtime {
 public:
  virtual ~Runtime() = default;

  // "cudaErrorMemoryAllocation (2): out of memory"
  virtual std::string Describe(Result result) = 0;
  // 1000 * major + 10 * minor of CUDA: what the driver serves (0: there is no
  // driver), and what this runtime is.
  virtual Result DriverVersion(int* version) = 0;
  virtual int RuntimeVersion() = 0;
  virtual Result DeviceCount(int* count) = 0;
  virtual Result Properties(int device, DeviceProperties* properties) = 0;

  virtual Result Use(int device) = 0;

  virtual Result MemoryInfo(size_t* free_bytes, size_t* total_bytes) = 0;
  // Device memory, aligned to 256 bytes.
  virtual Result Allocate(void** memory, size_t bytes) = 0;
  virtual Result Free(void* memory) = 0;
  // The host's memory, pinned: copies from and to it are asynchronous, and
  // kernels reach it by the same address.
  virtual Result AllocateHost(void** memory, size_t bytes) = 0;
  virtual Result FreeHost(void* memory) = 0;

  // A stream that waits for no other.
  virtual Result MakeStream(StreamHandle* stream) = 0;
  virtual Result DestroyStream(StreamHandle stream) = 0;
  virtual Result SynchronizeStream(StreamHandle stream) = 0;
  virtual Result SynchronizeDevice() = 0;

  // An event is over when what its stream had before the last Record is done.
  virtual Result MakeEvent(EventHandle* event) = 0;
  virtual Result DestroyEvent(EventHandle event) = 0;
  virtual Result RecordEvent(EventHandle event, StreamHandle stream) = 0;
  virtual Result WaitForEvent(EventHandle event) = 0;
  // Whether it is over. Of any device.
  virtual Result QueryEvent(EventHandle event, bool* over) = 0;

  // Between device memory and pinned memory, either way. Both stay until the
  // stream has come by.
  virtual Result CopyAsync(void* to, const void* from, size_t bytes,
                           StreamHandle stream) = 0;
  // What goes to the stream from now on becomes a graph and does not run. Calls
  // that CUDA cannot have in between, as waiting for the stream or, by this
  // thread, allocating memory, are refused, and so is the capture then.
  virtual Result BeginCapture(StreamHandle stream) = 0;
  // By the same thread. The capture is over whatever is returned; without a
  // graph where it failed.
  virtual Result EndCapture(StreamHandle stream, GraphHandle* graph) = 0;
  virtual Result DestroyGraph(GraphHandle graph) = 0;
  // What can be launched; the graph may go. It has its memory of the device, by
  // work of the stream, and a launch takes no more.
  virtual Result InstantiateGraph(GraphHandle graph, StreamHandle stream,
                                  ExecHandle* exec) = 0;
  // Nothing of it is under way.
  virtual Result DestroyExec(ExecHandle exec) = 0;
  virtual Result LaunchGraph(ExecHandle exec, StreamHandle stream) = 0;
  // From now on `function` may be launched with that much dynamic shared
  // memory.
  virtual Result AllowSharedBytes(const void* function, uint32_t bytes) = 0;
  // With ctas_together it is refused where they cannot all be resident. A
  // refused launch leaves no error behind.
  virtual Result Launch(const KernelLaunch& launch, StreamHandle stream) = 0;
};

}  // namespace kvasir::kernels::cuda
