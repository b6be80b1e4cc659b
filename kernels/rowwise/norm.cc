#include "base/status_macros.h"
#include "kernels/device/dispatch.h"
#include "kernels/rowwise/ops.h"

namespace kvasir::kernels {
namespace {

constexpr OpKernels<NormParams> kKernels = {"norm", &NormReference, &NormSimd};

}  // namespace

absl::Status Norm(Stream& stream, const NormParams& params,
                  Workspace& workspace) {
  KVASIR_RETURN_IF_ERROR(
      CheckActivations(kKernels.op, stream.device(), params.dtype));
  if (params.num_rows < 0) {
    return Refuse(kKernels.op, "rows", 0, params.num_rows);
  }
  if (params.columns < 1) {
    return Refuse(kKernels.op, "columns", 1, params.columns);
  }
  if (workspace.counting()) return CheckServed(kKernels, stream);
  return Launch(kKernels, stream, params);
}

}  // namespace kvasir::kernels
