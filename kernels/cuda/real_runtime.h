// Provides CUDA's own runtime as a Runtime.
#pragma once

#include "kernels/cuda/runtime.h"

namespace kvasir::kernels::cuda {

// Returns CUDA's own runtime, valid for the whole process. It is linked
// statically and opens the driver at the first call, so the program also starts
// on hosts without a driver.
Runtime& RealRuntime();

}  // namespace kvasir::kernels::cuda
