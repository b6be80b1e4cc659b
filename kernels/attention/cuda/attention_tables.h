// Makes the tables that paged_attention reads on a GPU.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/attention/cuda/attention_kernels.h"
#include "kernels/attention/cuda/device_attention.h"
#include "kernels/device/device.h"
#include "kernels/device/device_tables.h"

namespace kvasir::kernels {

// UNIMPLEMENTED, naming the feature, if a GPU's kernels do not serve the
// launch. The parameters were checked, and their lists are on the host.
absl::Status CheckDeviceServes(const PagedAttentionArgs& params);

// Makes what kernels read on device `on`. Lists are added to `tables`; the
// names of the kernels that will run are written to `kernels`. UNIMPLEMENTED if
// a CTA of the device has too little shared memory. If it has too little only
// for tensor cores, the plain kernel is used.
absl::StatusOr<AttentionDevice> MakeAttentionDevice(
    const PagedAttentionArgs& params, const Device& on, DeviceTables* tables,
    AttentionKernels* kernels);

}  // namespace kvasir::kernels
