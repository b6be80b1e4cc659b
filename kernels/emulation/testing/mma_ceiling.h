// The rate that a GPU's tensor cores reach with mma.sync when they do nothing
// else: a ceiling for kernels that use it. C++17, without Abseil.
#pragma once

#include <cstdint>

#include "kernels/device/launcher.h"

namespace kvasir::kernels {

// Threads per multiprocessor: 16 warps.
inline constexpr uint32_t kMmaCeilingThreads = 512;

struct MmaCeilingArgs {
  float* out = nullptr;  // [kMmaCeilingThreads * multiprocessors]
  uint32_t steps = 0;    // number of steps of each warp
};

// Enqueues products of 16 x 16 by 16 x 8 bf16 matrices that stay in registers,
// eight independent ones a step. `out` receives each thread's sums. Returns the
// number of operations: a multiplication and an addition count as two.
namespace emulated {
double LaunchMmaCeiling(const MmaCeilingArgs& args, Launcher& launcher);
}
namespace gpu {
double LaunchMmaCeiling(const MmaCeilingArgs& args, Launcher& launcher);
}

}  // namespace kvasir::kernels
