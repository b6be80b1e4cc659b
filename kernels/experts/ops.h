// Ops of a mixture of experts: which experts a token uses, and the sum of their
// outputs. The products are grouped_matmul (linear/). kernels/README.md has the
// contract that all ops follow.
#pragma once

#include "absl/status/status.h"
#include "kernels/device/stream.h"
#include "kernels/device/workspace.h"
#include "kernels/experts/mix_experts.h"
#include "kernels/experts/route.h"

namespace kvasir::kernels {

absl::Status Route(Stream& stream, const RouteParams& params,
                   Workspace& workspace);
absl::Status MixExperts(Stream& stream, const MixExpertsParams& params,
                        Workspace& workspace);

}  // namespace kvasir::kernels
