#include "kernels/linear/grouped_matmul.h"

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/device/dispatch.h"
#include "kernels/linear/ops.h"

namespace kvasir::kernels {
namespace {

// A GPU's grid has at most 65535 CTAs in y, each with 32 columns.
constexpr int64_t kMostColumns = 65535 * 32;

constexpr OpKernels<GroupedMatmulParams, DevicePtr<float>, DevicePtr<int64_t>>
    kKernels = {"grouped_matmul", &GroupedMatmulReference, &GroupedMatmulSimd};

}  // namespace

absl::Status GroupedMatmul(Stream& stream, const GroupedMatmulParams& params,
                           Workspace& workspace) {
  KVASIR_RETURN_IF_ERROR(
      CheckActivations(kKernels.op, stream.device(), params.dtype));
  const bool cpu = stream.device() == DeviceKind::kCpu;
  if ((params.weight.layout == WeightLayout::kPanels32) != cpu) {
    return absl::InvalidArgumentError(
        cpu ? "grouped_matmul: the weights must be in panels of 32 columns on "
              "the CPU, not in rows"
            : "grouped_matmul: the weights must be in rows on a GPU, not in "
              "panels of 32 columns");
  }
  const int64_t k = params.weight.k;
  const int64_t n = params.weight.n;
  if (params.num_rows < 0) {
    return Refuse(kKernels.op, "rows", 0, params.num_rows);
  }
  if (params.num_groups < 1) {
    return Refuse(kKernels.op, "groups", 1, params.num_groups);
  }
  if (k < 1) return Refuse(kKernels.op, "k", 1, k);
  if (n < 1) return Refuse(kKernels.op, "n", 1, n);
  if (!cpu && n > kMostColumns) {
    return absl::UnimplementedError(
        absl::StrCat("grouped_matmul: a GPU supports weights of at most ",
                     kMostColumns, " columns, not ", n));
  }
  if (params.x_row_stride < k) {
    return Refuse(kKernels.op, "x_row_stride", k, params.x_row_stride);
  }
  if (params.y_row_stride < n) {
    return Refuse(kKernels.op, "y_row_stride", n, params.y_row_stride);
  }
  Workspace::Scope scope(&workspace);
  // Null on a GPU, because our kernels there use shared memory.
  DevicePtr<float> scratch;
  DevicePtr<int64_t> first_parts;
  if (cpu) {
    scratch = workspace.Take<float>(MatmulScratch(ScratchThreads(stream)));
    first_parts = workspace.Take<int64_t>(params.num_groups + 1);
  }
  if (workspace.counting()) return CheckServed(kKernels, stream);
  if (!workspace.status().ok()) return workspace.status();
  if (params.num_rows == 0) return absl::OkStatus();
  return Launch(kKernels, stream, params, scratch, first_parts);
}

}  // namespace kvasir::kernels
