// Products with packed weights. The contract of every op: kernels/README.md.
#pragma once

#include "absl/status/status.h"
#include "kernels/device/stream.h"
#include "kernels/device/workspace.h"
#include "kernels/linear/matmul.h"

namespace kvasir::kernels {

absl::Status Matmul(Stream& stream, const MatmulParams& params,
                    Workspace& workspace);

}  // namespace kvasir::kernels
