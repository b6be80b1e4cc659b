#include "kernels/latents/kv_append.h"

#include "base/status_macros.h"
#include "kernels/device/dispatch.h"
#include "kernels/latents/latent_check.h"
#include "kernels/latents/ops.h"

namespace kvasir::kernels {
namespace {

constexpr OpKernels<const KvAppendParams&> kKernels = {
    "kv_append", &KvAppendReference, &KvAppendSimd};

absl::Status CheckPart(const KvAppendPart& side, int64_t page_tokens) {
  KVASIR_RETURN_IF_ERROR(CheckLatentPart(kKernels.op, side.part, page_tokens));
  for (int64_t g = 0; g < side.part.num_groups; ++g) {
    const LatentGroup& group = side.part.groups[g];
    if (side.row_stride < group.column + group.width) {
      return Refuse(kKernels.op, "row_stride", group.column + group.width,
                    side.row_stride);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status KvAppend(Stream& stream, const KvAppendParams& params,
                      Workspace& workspace) {
  if (params.num_tokens < 0) {
    return Refuse(kKernels.op, "tokens", 0, params.num_tokens);
  }
  if (params.page_tokens < 1) {
    return Refuse(kKernels.op, "page_tokens", 1, params.page_tokens);
  }
  for (int64_t p = 0; p < params.num_parts; ++p) {
    KVASIR_RETURN_IF_ERROR(CheckPart(params.parts[p], params.page_tokens));
  }
  if (workspace.counting()) return absl::OkStatus();
  return Launch(kKernels, stream, params);
}

}  // namespace kvasir::kernels
