// Where libtorch works: on the CPU, or on a GPU if the libtorch that was found
// has CUDA.
#pragma once

#include <c10/core/Device.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvasir::compress {

// FAILED_PRECONDITION when `name` (auto, cpu or cuda) is not there,
// INVALID_ARGUMENT for another name.
absl::Status CheckDevice(const std::string& name);

// The device of that name; auto: a GPU if there is one. Products of float32 are
// then done in float32 there too, in the whole process. Errors as CheckDevice.
absl::StatusOr<c10::Device> OpenDevice(const std::string& name);

// How many of `threads` give a device work: one keeps a GPU busy.
int ThreadsFor(const c10::Device& device, int threads);

}  // namespace kvasir::compress
