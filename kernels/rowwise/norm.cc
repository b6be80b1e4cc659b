#include <utility>

#include "base/status_macros.h"
#include "kernels/device/dispatch.h"
#include "kernels/rowwise/ops.h"

namespace kvasir::kernels {
namespace {

constexpr OpKernels<NormParams> kKernels = {"norm", &NormReference, &NormSimd};

// If the size of a row and params.stride are multiples of 16 bytes, a GPU
// always reads 16 bytes at a time, so rows must be aligned. Reading unaligned
// rows in another way would change the order of sums, which may depend only on
// sizes.
absl::Status CheckAlignment(const NormParams& params) {
  constexpr int64_t kAccessBytes = 16;
  if (params.columns * DTypeBytes(params.dtype) % kAccessBytes != 0 ||
      params.stride * DTypeBytes(params.dtype) % kAccessBytes != 0) {
    return absl::OkStatus();
  }
  const std::pair<const char*, const void*> operands[] = {
      {"x", params.x.device_address()},
      {"residual", params.residual.device_address()},
      {"weight", params.weight.device_address()},
      {"bias", params.bias.device_address()},
      {"out", params.out.device_address()}};
  for (const auto& [name, address] : operands) {
    const uintptr_t behind =
        reinterpret_cast<uintptr_t>(address) % kAccessBytes;
    if (behind == 0) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        kKernels.op, ": ", name, ": with rows of ", params.columns, " ",
        DTypeName(params.dtype), " numbers, the address must be a multiple of ",
        kAccessBytes, " bytes, but is ", behind,
        " bytes above such a multiple"));
  }
  return absl::OkStatus();
}

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
  if (params.num_parts < 1) {
    return Refuse(kKernels.op, "parts", 1, params.num_parts);
  }
  if (params.stride != 0 && params.stride < params.num_parts * params.columns) {
    return Refuse(kKernels.op, "stride", params.num_parts * params.columns,
                  params.stride);
  }
  if (params.residual && params.stride != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(kKernels.op, ": a residual is allowed only for separate ",
                     "rows (stride 0), but the stride is ", params.stride));
  }
  if (stream.device() != DeviceKind::kCpu) {
    KVASIR_RETURN_IF_ERROR(CheckAlignment(params));
  }
  if (workspace.counting()) return CheckServed(kKernels, stream);
  return Launch(kKernels, stream, params);
}

}  // namespace kvasir::kernels
