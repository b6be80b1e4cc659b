#include "base/status_macros.h"
#include "kernels/dispatch.h"
#include "kernels/ops.h"

namespace kvasir::kernels {
namespace {

constexpr OpKernels<const KvAppendParams&> kKernels = {
    "kv_append", &KvAppendReference, &KvAppendSimd};

absl::Status CheckSide(const KvSideView& view, int64_t row_stride) {
  if (view.num_groups < 1) {
    return Refuse(kKernels.op, "groups", 1, view.num_groups);
  }
  if (view.width < 1) return Refuse(kKernels.op, "width", 1, view.width);
  const int64_t slot_bytes = view.width * DTypeBytes(view.dtype);
  if (view.slot_stride_bytes < slot_bytes) {
    return Refuse(kKernels.op, "slot_stride_bytes", slot_bytes,
                  view.slot_stride_bytes);
  }
  if (row_stride < view.num_groups * view.width) {
    return Refuse(kKernels.op, "row_stride", view.num_groups * view.width,
                  row_stride);
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
  KVASIR_RETURN_IF_ERROR(CheckSide(params.key_view, params.key_row_stride));
  KVASIR_RETURN_IF_ERROR(CheckSide(params.value_view, params.value_row_stride));
  if (workspace.counting()) return absl::OkStatus();
  return Launch(kKernels, stream, params);
}

}  // namespace kvasir::kernels
