// Runs every primitive's kernel once on one of two targets, so that a test can
// compare the GPU with the emulator.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/device/device.h"

namespace kvasir::kernels {

struct PrimitiveRun {
  std::string name;
  std::vector<uint32_t> words;  // output of the kernel
  // Two floats may differ by at most `tolerance` times (1 + their magnitude).
  // If `tolerance` is 0, the bits of the words must be equal.
  float tolerance = 0.0f;
};

// Both functions use the same inputs and return the results of the kernels in
// the same order. Bulk copies, which need sm_90, are included only if
// `bulk_copies` is set.
namespace emulated {
std::vector<PrimitiveRun> RunPrimitives(Device& device, bool bulk_copies);
}
namespace gpu {
std::vector<PrimitiveRun> RunPrimitives(Device& device, bool bulk_copies);
}

}  // namespace kvasir::kernels
