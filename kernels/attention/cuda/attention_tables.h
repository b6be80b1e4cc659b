// The tables that paged_attention has on a GPU.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/attention/cuda/attention_kernels.h"
#include "kernels/attention/cuda/device_attention.h"
#include "kernels/device/device.h"
#include "kernels/device/device_tables.h"

namespace kvasir::kernels {

// UNIMPLEMENTED for what a GPU's kernels do not serve, by its name. The
// parameters are those of a launch, checked, with their lists on the host.
absl::Status CheckDeviceServes(const PagedAttentionArgs& params);

// What kernels read on device `on`; its lists are put into `tables`, and what
// serves it into `kernels`. UNIMPLEMENTED where its CTAs have too little shared
// memory; what they have too little of for tensor cores is served by the plain
// kernel.
absl::StatusOr<AttentionDevice> MakeAttentionDevice(
    const PagedAttentionArgs& params, const Device& on, DeviceTables* tables,
    AttentionKernels* kernels);

}  // namespace kvasir::kernels
