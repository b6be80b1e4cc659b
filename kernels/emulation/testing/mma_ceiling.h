// What a GPU's tensor cores reach by mma.sync when nothing else is to be done:
// a ceiling for kernels that multiply by it. C++17 and free of Abseil.
#pragma once

#include <cstdint>

#include "kernels/device/launcher.h"

namespace kvasir::kernels {

// Threads that a multiprocessor has of it: 16 warps.
inline constexpr uint32_t kMmaCeilingThreads = 512;

struct MmaCeilingArgs {
  float* out = nullptr;  // [kMmaCeilingThreads * multiprocessors]
  uint32_t steps = 0;    // of each warp
};

// Enqueues products of 16 x 16 by 16 x 8 bf16 numbers that stay in registers,
// eight independent ones a step; out is what a thread has of their sums.
// Returns the operations: two to each number that is multiplied.
namespace emulated {
double LaunchMmaCeiling(const MmaCeilingArgs& args, Launcher& launcher);
}
namespace gpu {
double LaunchMmaCeiling(const MmaCeilingArgs& args, Launcher& launcher);
}

}  // namespace kvasir::kernels
