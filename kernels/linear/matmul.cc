#include "base/status_macros.h"
#include "kernels/device/dispatch.h"
#include "kernels/linear/ops.h"

namespace kvasir::kernels {
namespace {

constexpr OpKernels<MatmulParams, DevicePtr<float>> kKernels = {
    "matmul", &MatmulReference, &MatmulSimd};

}  // namespace

absl::Status Matmul(Stream& stream, const MatmulParams& params,
                    Workspace& workspace) {
  KVASIR_RETURN_IF_ERROR(
      CheckActivations(kKernels.op, stream.device(), params.dtype));
  const int64_t k = params.weight.k;
  const int64_t n = params.weight.n;
  if (params.num_rows < 0) {
    return Refuse(kKernels.op, "rows", 0, params.num_rows);
  }
  if (k < 1) return Refuse(kKernels.op, "k", 1, k);
  if (n < 1) return Refuse(kKernels.op, "n", 1, n);
  if (params.x_row_stride < k) {
    return Refuse(kKernels.op, "x_row_stride", k, params.x_row_stride);
  }
  if (params.y_row_stride < n) {
    return Refuse(kKernels.op, "y_row_stride", n, params.y_row_stride);
  }
  if (stream.device() == DeviceKind::kCpu &&
      params.weight.layout != WeightLayout::kPanels32) {
    return absl::InvalidArgumentError(
        "matmul: weight: the CPU has panels of 32 columns, not rows");
  }
  Workspace::Scope scope(&workspace);
  const DevicePtr<float> scratch =
      workspace.Take<float>(MatmulScratch(ScratchThreads(stream)));
  if (workspace.counting()) return CheckServed(kKernels, stream);
  if (!workspace.status().ok()) return workspace.status();
  if (params.num_rows == 0) return absl::OkStatus();
  return Launch(kKernels, stream, params, scratch);
}

}  // namespace kvasir::kernels
