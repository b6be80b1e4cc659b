// The table of the ops that nvcc compiled for the GPU. C++17, without Abseil.
#pragma once

#include "kernels/device/device_ops.h"

namespace kvasir::kernels {

// Returns the table of all ops that have kernels for the GPU. It is valid for
// the whole process.
DeviceOps GpuOps();

}  // namespace kvasir::kernels
