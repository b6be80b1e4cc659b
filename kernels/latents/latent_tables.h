// Copies the groups and runs of a latent part to the device, where kernels read
// them.
#pragma once

#include "absl/status/statusor.h"
#include "kernels/device/device_tables.h"
#include "kernels/latents/latent_view.h"

namespace kvasir::kernels {

// Copies the groups of `part` and their runs from host memory into `tables`.
// Returns `part` with `groups` and each group's `runs` replaced by device
// addresses, which the host must not dereference.
absl::StatusOr<LatentPart> AddLatentTables(LatentPart part,
                                           DeviceTables* tables);

}  // namespace kvasir::kernels
