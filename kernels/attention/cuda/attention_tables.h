// Makes the tables that the GPU kernels of paged_attention read.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/attention/cuda/attention_kernels.h"
#include "kernels/attention/cuda/device_attention.h"
#include "kernels/device/device.h"
#include "kernels/device/device_tables.h"

namespace kvasir::kernels {

// Returns UNIMPLEMENTED if the layer has a feature that the GPU kernels do not
// support; the message names the feature. `params` must have been validated,
// and all its lists must be in host memory.
absl::Status CheckDeviceServes(const PagedAttentionArgs& params);

// Returns the description of a layer for its kernels on device `on`. The lists
// to which it points are added to `tables`, and `*kernels` is set to the
// names of the kernels that will run. If a CTA has too little shared memory for
// the kernel for tensor cores, the plain kernel is chosen. If it also has too
// little for the plain kernel, the error is UNIMPLEMENTED.
absl::StatusOr<AttentionDevice> MakeAttentionDevice(
    const PagedAttentionArgs& params, const Device& on, DeviceTables* tables,
    AttentionKernels* kernels);

}  // namespace kvasir::kernels
