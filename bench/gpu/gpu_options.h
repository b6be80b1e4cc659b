// Which GPU is measured, and by whose products.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/cuda/cuda_device.h"

namespace kvasir::bench {

enum class Products : uint8_t {
  kOwn,      // our kernels: what measures attention alone needs no library
  kLibrary,  // cuBLASLt's, as steps are served
};

// Of "cuda" or "cuda:N"; INVALID_ARGUMENT for another name.
absl::StatusOr<kernels::CudaDeviceOptions> GpuOptions(const std::string& name,
                                                      Products products);

}  // namespace kvasir::bench
