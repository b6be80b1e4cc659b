// The device of libtorch's work: the CPU, or a GPU if the libtorch in use
// supports CUDA.
#pragma once

#include <c10/core/Device.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvasir::compress {

// FAILED_PRECONDITION if the device `name` (auto, cpu or cuda) is not
// available, INVALID_ARGUMENT for another name.
absl::Status CheckDevice(const std::string& name);

// Returns the device of that name; auto is a GPU if there is one. On a GPU,
// float32 products are then computed in float32 in the whole process. Errors:
// as CheckDevice.
absl::StatusOr<c10::Device> OpenDevice(const std::string& name);

// The number of `threads` that should give work to the device: one keeps a GPU
// busy.
int ThreadsFor(const c10::Device& device, int threads);

}  // namespace kvasir::compress
