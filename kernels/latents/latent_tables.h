// The groups and runs of a latent part on the device, for kernels that read
// them there.
#pragma once

#include "absl/status/statusor.h"
#include "kernels/device/device_tables.h"
#include "kernels/latents/latent_view.h"

namespace kvasir::kernels {

// `part`, whose tables are host memory, with copies of its groups and their
// runs in `tables`: in what comes back, `groups` and each group's `runs` are
// addresses of the device, which the host may not look behind. All else stays
// as it is.
absl::StatusOr<LatentPart> AddLatentTables(LatentPart part,
                                           DeviceTables* tables);

}  // namespace kvasir::kernels
