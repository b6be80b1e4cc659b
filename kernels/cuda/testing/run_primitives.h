// Every primitive's kernel once, on one of two targets: what a GPU makes of it
// beside what the emulator does.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/device/device.h"

namespace kvasir::kernels {

struct PrimitiveRun {
  std::string name;
  std::vector<uint32_t> words;  // that the kernel wrote
  // Of floats: how far both may be apart over 1 + their size. 0: the same bits.
  float tolerance = 0.0f;
};

// The same inputs and the same order for both. Bulk copies are sm_90's.
namespace emulated {
std::vector<PrimitiveRun> RunPrimitives(Device& device, bool bulk_copies);
}
namespace gpu {
std::vector<PrimitiveRun> RunPrimitives(Device& device, bool bulk_copies);
}

}  // namespace kvasir::kernels
