// Attention over latents in pages. The contract of every op: kernels/README.md.
#pragma once

#include "absl/status/status.h"
#include "kernels/attention/paged_attention.h"
#include "kernels/device/stream.h"
#include "kernels/device/workspace.h"

namespace kvasir::kernels {

absl::Status PagedAttention(Stream& stream, const PagedAttentionParams& params,
                            Workspace& workspace);

}  // namespace kvasir::kernels
