// Ops that multiply by packed weights. kernels/README.md has the contract
// that all ops follow.
#pragma once

#include "absl/status/status.h"
#include "kernels/device/stream.h"
#include "kernels/device/workspace.h"
#include "kernels/linear/grouped_matmul.h"
#include "kernels/linear/matmul.h"

namespace kvasir::kernels {

absl::Status Matmul(Stream& stream, const MatmulParams& params,
                    Workspace& workspace);
absl::Status GroupedMatmul(Stream& stream, const GroupedMatmulParams& params,
                           Workspace& workspace);

}  // namespace kvasir::kernels
