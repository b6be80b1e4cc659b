// A kernel that executes only mma.sync. Its rate on a GPU is the ceiling for
// our kernels that use this instruction. C++17, without Abseil.
#pragma once

#include <cstdint>

#include "kernels/device/launcher.h"

namespace kvasir::kernels {

// The number of threads that the kernel runs on each multiprocessor (16 warps).
inline constexpr uint32_t kMmaCeilingThreads = 512;

struct MmaCeilingArgs {
  float* out = nullptr;  // [kMmaCeilingThreads * multiprocessors]
  uint32_t steps = 0;    // number of steps of each warp
};

// Enqueues the kernel: in each step, a warp multiplies eight pairs of bf16
// matrices (16 x 16 by 16 x 8) in registers. `out` receives the sums of each
// thread. Returns the number of arithmetic operations; a multiply-add counts as
// two.
namespace emulated {
double LaunchMmaCeiling(const MmaCeilingArgs& args, Launcher& launcher);
}
namespace gpu {
double LaunchMmaCeiling(const MmaCeilingArgs& args, Launcher& launcher);
}

}  // namespace kvasir::kernels
