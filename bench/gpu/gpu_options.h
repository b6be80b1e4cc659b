// Options of the measured GPU and of the library for matrix products.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/cuda/cuda_device.h"

namespace kvasir::bench {

enum class Products : uint8_t {
  kOwn,      // our own kernels; enough for measurements of attention
  kLibrary,  // cuBLASLt, as in serving
};

// Parses "cuda" or "cuda:N"; INVALID_ARGUMENT for another name.
absl::StatusOr<kernels::CudaDeviceOptions> GpuOptions(const std::string& name,
                                                      Products products);

}  // namespace kvasir::bench
