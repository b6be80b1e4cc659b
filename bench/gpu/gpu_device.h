// The device of a benchmark for GPUs, and how time is taken there.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "bench/gpu/gpu_options.h"
#include "bench/step_timer.h"
#include "kernels/device/device.h"

namespace kvasir::bench {

// "cuda:N", where the build has it, or "emulated", from the module in a file.
// INVALID_ARGUMENT for another name; UNIMPLEMENTED without nvcc;
// MakeCudaDevice's and LoadDevice's. The emulated device has its own products.
absl::StatusOr<std::unique_ptr<kernels::Device>> OpenGpu(
    const std::string& name, const std::string& module, Products products);

absl::StatusOr<std::unique_ptr<DeviceClock>> ClockOf(
    const kernels::Device& device);

// There are as many as are opened; so many are enough.
inline constexpr int kEmulatedGpus = 2;

struct GpuFacts {
  std::string name;
  int multiprocessors = 0;
  int64_t l2_bytes = 0;
  int64_t memory_bytes = 0;
  int64_t free_bytes = 0;
  int gpus = 0;  // that ranks may have
  std::string timed_by;
};
absl::StatusOr<GpuFacts> FactsOf(const kernels::Device& device);

}  // namespace kvasir::bench
