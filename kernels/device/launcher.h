// How an op of a GPU puts its kernel on a stream. C++17 and free of Abseil:
// device code includes this.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvasir::kernels {

// One launch. A kernel takes one struct of parameters by value; `simt::Launch`
// (simt/launch.h) fills in the last four members.
struct KernelLaunch {
  const char* name = "";       // of the kernel, for reports
  uint32_t grid_x = 1;         // CTAs; none: nothing is enqueued
  uint32_t grid_y = 1;         // CTAs
  uint32_t threads = 1;        // of a CTA, whole warps
  uint32_t shared_bytes = 0;   // dynamic shared memory of a CTA
  bool ctas_together = false;  // CTAs wait for each other: all must be resident

  const void* function = nullptr;
  // function(*args) on the host; null in code that nvcc compiled.
  void (*call)(const void* function, const void* args) = nullptr;
  const void* args = nullptr;  // copied when it is enqueued
  size_t args_bytes = 0;
};

class GemmLibrary;  // gemm.h

// Where kernels of one stream are enqueued.
//
// Threads: those of its stream, one at a time.
// Errors: kept by the stream.
class Launcher {
 public:
  virtual ~Launcher() = default;
  virtual void Enqueue(const KernelLaunch& launch) = 0;
  // For grids that stay: CTAs that are resident together are at most as many
  // for each of these.
  virtual int multiprocessors() const = 0;
  // The library that multiplies on this stream; null: our own kernels do.
  virtual GemmLibrary* gemms() { return nullptr; }
};

}  // namespace kvasir::kernels
