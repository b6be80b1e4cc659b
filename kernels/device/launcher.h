// Enqueues the kernels of a GPU's ops on a stream. C++17 without Abseil,
// because device code includes this.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvasir::kernels {

// One launch. A kernel takes one struct of parameters by value; `simt::Launch`
// (simt/launch.h) fills in the last four members.
struct KernelLaunch {
  const char* name = "";      // the kernel's name, for reports
  uint32_t grid_x = 1;        // CTAs; 0: nothing is enqueued
  uint32_t grid_y = 1;        // CTAs
  uint32_t threads = 1;       // threads of a CTA, whole warps
  uint32_t shared_bytes = 0;  // dynamic shared memory of a CTA
  // True if CTAs wait for each other, so that all must be resident at the same
  // time (a cooperative launch).
  bool ctas_together = false;

  const void* function = nullptr;
  // Calls function(*args) on the host; null in code that nvcc compiled.
  void (*call)(const void* function, const void* args) = nullptr;
  const void* args = nullptr;  // copied when the launch is enqueued
  size_t args_bytes = 0;
};

class GemmLibrary;  // gemm.h

// Enqueues kernels on one stream.
// Threads: only one thread at a time may use this object or its stream.
// Errors: the stream keeps an error of a launch and returns it later by
// LaunchStream::TakeLaunchError.
class Launcher {
 public:
  virtual ~Launcher() = default;
  virtual void Enqueue(const KernelLaunch& launch) = 0;
  // The number of the GPU's multiprocessors. Kernels whose CTAs must all be
  // resident at the same time size their grids by it.
  virtual int multiprocessors() const = 0;
  // Returns the library that multiplies matrices on this stream, or null if our
  // own kernels multiply them.
  virtual GemmLibrary* gemms() { return nullptr; }
};

}  // namespace kvasir::kernels
