// Opens the device of GPU benchmarks and its clock.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "bench/gpu/gpu_options.h"
#include "bench/step_timer.h"
#include "kernels/device/device.h"

namespace kvasir::bench {

// Opens the device "cuda" or "cuda:N", or the device "emulated", which is
// loaded from the shared library `module` and always uses its own matrix
// products. Errors: INVALID_ARGUMENT for another name (in a build without nvcc,
// UNIMPLEMENTED for every name but "emulated"), and the errors of
// MakeCudaDevice and LoadDevice.
absl::StatusOr<std::unique_ptr<kernels::Device>> OpenGpu(
    const std::string& name, const std::string& module, Products products);

absl::StatusOr<std::unique_ptr<DeviceClock>> ClockOf(
    const kernels::Device& device);

// The number of GPUs that GpuFacts reports for the emulated device. Any number
// could be opened, but tests do not need more.
inline constexpr int kEmulatedGpus = 2;

struct GpuFacts {
  std::string name;
  int multiprocessors = 0;
  int64_t l2_bytes = 0;
  int64_t memory_bytes = 0;
  int64_t free_bytes = 0;
  int gpus = 0;  // the number of GPUs that ranks can use
  std::string timed_by;
};
absl::StatusOr<GpuFacts> FactsOf(const kernels::Device& device);

}  // namespace kvasir::bench
