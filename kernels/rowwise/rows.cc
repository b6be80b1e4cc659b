#include "kernels/device/dispatch.h"
#include "kernels/rowwise/ops.h"

namespace kvasir::kernels {
namespace {

constexpr OpKernels<const AddRowsParams&> kAddRows = {
    "add_rows", &AddRowsReference, &AddRowsSimd};
constexpr OpKernels<const GatherRowsParams&> kGatherRows = {
    "gather_rows", &GatherRowsReference, &GatherRowsSimd};

absl::Status CheckSizes(const char* op, int64_t num_rows, int64_t columns) {
  if (num_rows < 0) return Refuse(op, "rows", 0, num_rows);
  if (columns < 0) return Refuse(op, "columns", 0, columns);
  return absl::OkStatus();
}

}  // namespace

absl::Status AddRows(Stream& stream, const AddRowsParams& params,
                     Workspace& workspace) {
  const absl::Status sizes =
      CheckSizes(kAddRows.op, params.num_rows, params.columns);
  if (!sizes.ok() || workspace.counting()) return sizes;
  return Launch(kAddRows, stream, params);
}

absl::Status GatherRows(Stream& stream, const GatherRowsParams& params,
                        Workspace& workspace) {
  const absl::Status sizes =
      CheckSizes(kGatherRows.op, params.num_rows, params.columns);
  if (!sizes.ok() || workspace.counting()) return sizes;
  return Launch(kGatherRows, stream, params);
}

}  // namespace kvasir::kernels
