#include "base/status_macros.h"
#include "kernels/device/dispatch.h"
#include "kernels/rowwise/ops.h"

namespace kvasir::kernels {
namespace {

constexpr OpKernels<SiluMulParams> kKernels = {"silu_mul", &SiluMulReference,
                                               &SiluMulSimd};

}  // namespace

absl::Status SiluMul(Stream& stream, const SiluMulParams& params,
                     Workspace& workspace) {
  KVASIR_RETURN_IF_ERROR(
      CheckActivations(kKernels.op, stream.device(), params.dtype));
  if (params.num_rows < 0) {
    return Refuse(kKernels.op, "rows", 0, params.num_rows);
  }
  if (params.features < 1) {
    return Refuse(kKernels.op, "features", 1, params.features);
  }
  if (workspace.counting()) return CheckServed(kKernels, stream);
  return Launch(kKernels, stream, params);
}

}  // namespace kvasir::kernels
