#include "kernels/latents/hadamard.h"

#include <algorithm>
#include <vector>

#include "base/status_macros.h"
#include "kernels/device/dispatch.h"
#include "kernels/latents/ops.h"

namespace kvasir::kernels {
namespace {

constexpr OpKernels<HadamardParams, DevicePtr<float>> kKernels = {
    "hadamard", &HadamardReference, &HadamardSimd};

absl::Status CheckLatent(const HadamardParams& params,
                         const HadamardPlace& place) {
  if (place.width < 1) return Refuse(kKernels.op, "width", 1, place.width);
  if (place.column < 0) return Refuse(kKernels.op, "column", 0, place.column);
  const int64_t end = place.column + place.width;
  if (params.x_row_stride < end) {
    return Refuse(kKernels.op, "x_row_stride", end, params.x_row_stride);
  }
  if (params.y_row_stride < end) {
    return Refuse(kKernels.op, "y_row_stride", end, params.y_row_stride);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<PreparedHadamard> Prepare(Device& device,
                                         const HadamardParams& shape,
                                         absl::Span<const HadamardPlace> places,
                                         HadamardTables* shared) {
  KVASIR_RETURN_IF_ERROR(
      CheckActivations(kKernels.op, device.kind(), shape.dtype));
  PreparedHadamard prepared(&device);
  HadamardParams& params = prepared.params;
  params = shape;
  std::vector<HadamardLatent> latents;
  for (const HadamardPlace& place : places) {
    KVASIR_RETURN_IF_ERROR(CheckLatent(params, place));
    KVASIR_ASSIGN_OR_RETURN(const HadamardTables::Blocks* const blocks,
                            shared->BlocksFor(place.width));
    latents.push_back(
        {place.column, blocks->device.device_address(), blocks->count});
    params.scratch_floats =
        std::max(params.scratch_floats, blocks->scratch_floats);
  }
  if (device.kind() != DeviceKind::kCpu &&
      params.scratch_floats / 2 > kCudaHadamardFloats) {
    return absl::UnimplementedError(absl::StrCat(
        kKernels.op, ": a block of ", params.scratch_floats / 2,
        " numbers is too large for the GPU kernel, which supports at most ",
        kCudaHadamardFloats));
  }
  params.num_latents = static_cast<int64_t>(latents.size());
  KVASIR_ASSIGN_OR_RETURN(params.latents,
                          prepared.tables.Add<HadamardLatent>(latents));
  return prepared;
}

absl::Status Hadamard(Stream& stream, const PreparedHadamard& prepared,
                      const HadamardRows& rows, Workspace& workspace) {
  if (rows.num_rows < 0) {
    return Refuse(kKernels.op, "rows", 0, rows.num_rows);
  }
  HadamardParams params = prepared.params;
  params.x = rows.x;
  params.y = rows.y;
  params.num_rows = rows.num_rows;
  Workspace::Scope scope(&workspace);
  DevicePtr<float> scratch;  // only used on a CPU; a GPU uses shared memory
  if (stream.device() == DeviceKind::kCpu) {
    scratch =
        workspace.Take<float>(params.scratch_floats * ScratchThreads(stream));
  }
  if (workspace.counting()) return CheckServed(kKernels, stream);
  if (!workspace.status().ok()) return workspace.status();
  return Launch(kKernels, stream, params, scratch);
}

}  // namespace kvasir::kernels
