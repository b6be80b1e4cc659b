// Where libtorch works: on the CPU, or on a GPU if the libtorch that was found
// has CUDA.
#pragma once

#include <c10/core/Device.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvasir::compress {

// What float32 products on a GPU are done in. The CPU has float32 alone.
enum class GpuProducts {
  kFloat32,
  kTensorFloat32,  // faster, with 10 bits of mantissa
};

// FAILED_PRECONDITION when `name` (auto, cpu or cuda) is not there,
// INVALID_ARGUMENT for another name.
absl::Status CheckDevice(const std::string& name);

// The device of that name; auto: a GPU if there is one. How products are done
// is set for the process. Errors as CheckDevice.
absl::StatusOr<c10::Device> OpenDevice(
    const std::string& name, GpuProducts products = GpuProducts::kFloat32);

// How many of `threads` give a device work: one keeps a GPU busy.
int ThreadsFor(const c10::Device& device, int threads);

}  // namespace kvasir::compress
