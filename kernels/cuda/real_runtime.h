// CUDA's own runtime.
#pragma once

#include "kernels/cuda/runtime.h"

namespace kvasir::kernels::cuda {

// For the whole process. It is linked in and opens the driver by itself at the
// first call, so that a program with it starts where there is none.
Runtime& RealRuntime();

}  // namespace kvasir::kernels::cuda
