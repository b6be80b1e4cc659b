#include "kernels/device/dispatch.h"
#include "kernels/rowwise/ops.h"

namespace kvasir::kernels {
namespace {

constexpr OpKernels<AddRowsParams> kAddRows = {"add_rows", &AddRowsReference,
                                               &AddRowsSimd};
constexpr OpKernels<SumRowsParams> kSumRows = {"sum_rows", &SumRowsReference,
                                               &SumRowsSimd};
constexpr OpKernels<GatherRowsParams> kGatherRows = {
    "gather_rows", &GatherRowsReference, &GatherRowsSimd};

template <typename Params>
absl::Status Check(const char* op, const Stream& stream, const Params& params) {
  if (params.num_rows < 0) return Refuse(op, "rows", 0, params.num_rows);
  if (params.columns < 0) return Refuse(op, "columns", 0, params.columns);
  return CheckActivations(op, stream.device(), params.dtype);
}

}  // namespace

absl::Status AddRows(Stream& stream, const AddRowsParams& params,
                     Workspace& workspace) {
  const absl::Status checked = Check(kAddRows.op, stream, params);
  if (!checked.ok()) return checked;
  if (workspace.counting()) return CheckServed(kAddRows, stream);
  return Launch(kAddRows, stream, params);
}

absl::Status SumRows(Stream& stream, const SumRowsParams& params,
                     Workspace& workspace) {
  const absl::Status checked = Check(kSumRows.op, stream, params);
  if (!checked.ok()) return checked;
  if (params.num_rows < 1) {
    return Refuse(kSumRows.op, "rows", 1, params.num_rows);
  }
  if (workspace.counting()) return CheckServed(kSumRows, stream);
  return Launch(kSumRows, stream, params);
}

absl::Status GatherRows(Stream& stream, const GatherRowsParams& params,
                        Workspace& workspace) {
  const absl::Status checked = Check(kGatherRows.op, stream, params);
  if (!checked.ok()) return checked;
  if (workspace.counting()) return CheckServed(kGatherRows, stream);
  return Launch(kGatherRows, stream, params);
}

}  // namespace kvasir::kernels
