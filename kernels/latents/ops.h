// Ops that make, move and turn latents. The contract of every op:
// kernels/README.md.
#pragma once

#include "absl/status/status.h"
#include "kernels/device/stream.h"
#include "kernels/device/workspace.h"
#include "kernels/latents/copy_pages.h"
#include "kernels/latents/hadamard.h"
#include "kernels/latents/kv_append.h"
#include "kernels/latents/lift.h"

namespace kvasir::kernels {

absl::Status Lift(Stream& stream, const LiftParams& params,
                  Workspace& workspace);
absl::Status ComplexLift(Stream& stream, const ComplexLiftParams& params,
                         Workspace& workspace);
absl::Status Hadamard(Stream& stream, const HadamardParams& params,
                      Workspace& workspace);
absl::Status KvAppend(Stream& stream, const KvAppendParams& params,
                      Workspace& workspace);
absl::Status CopyPages(Stream& stream, const CopyPagesParams& params,
                       Workspace& workspace);

}  // namespace kvasir::kernels
