// Puts the groups and runs of a latent part on the device, for kernels that
// read them there.
#pragma once

#include "absl/status/statusor.h"
#include "kernels/device/device_tables.h"
#include "kernels/latents/latent_view.h"

namespace kvasir::kernels {

// Copies the groups of `part` and their runs, which are host memory, into
// `tables`. In the result `groups` and each group's `runs` are device
// addresses, which the host must not dereference. Everything else is unchanged.
absl::StatusOr<LatentPart> AddLatentTables(LatentPart part,
                                           DeviceTables* tables);

}  // namespace kvasir::kernels
