#include "base/status_macros.h"
#include "kernels/device/dispatch.h"
#include "kernels/rowwise/ops.h"

namespace kvasir::kernels {
namespace {

constexpr OpKernels<ActivationParams> kKernels = {
    "activation", &ActivationReference, &ActivationSimd};

}  // namespace

absl::Status Activation(Stream& stream, const ActivationParams& params,
                        Workspace& workspace) {
  KVASIR_RETURN_IF_ERROR(
      CheckActivations(kKernels.op, stream.device(), params.dtype));
  if (params.num_rows < 0) {
    return Refuse(kKernels.op, "rows", 0, params.num_rows);
  }
  if (params.columns < 1) {
    return Refuse(kKernels.op, "columns", 1, params.columns);
  }
  if (params.kind == ActivationKind::kSoftCap && !(params.cap > 0.0f)) {
    return absl::InvalidArgumentError(absl::StrCat(
        kKernels.op, ": the cap must be above 0, but is ", params.cap));
  }
  if (workspace.counting()) return CheckServed(kKernels, stream);
  return Launch(kKernels, stream, params);
}

}  // namespace kvasir::kernels
