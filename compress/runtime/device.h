// Chooses the device on which libtorch works: the CPU, or a GPU if this build
// of libtorch supports CUDA.
#pragma once

#include <c10/core/Device.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvasir::compress {

// Returns FAILED_PRECONDITION if the device `name` (auto, cpu or cuda) is not
// available, INVALID_ARGUMENT for any other name.
absl::Status CheckDevice(const std::string& name);

// Returns the device of that name; auto is a GPU if there is one. If it is a
// GPU, float32 products are from then on computed in full float32 in the whole
// process. Errors: those of CheckDevice.
absl::StatusOr<c10::Device> OpenDevice(const std::string& name);

// Returns how many of `threads` should send work to the device: on a GPU only
// one, because one thread keeps the GPU busy.
int ThreadsFor(const c10::Device& device, int threads);

}  // namespace kvasir::compress
