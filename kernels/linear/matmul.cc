#include <cstddef>

#include "base/status_macros.h"
#include "kernels/device/dispatch.h"
#include "kernels/device/gemm.h"
#include "kernels/linear/ops.h"

namespace kvasir::kernels {
namespace {

constexpr OpKernels<MatmulParams, DevicePtr<float>> kKernels = {
    "matmul", &MatmulReference, &MatmulSimd};

// A GPU's grid has at most 65535 CTAs in y. The kernel that reads single
// numbers computes 32 columns per CTA in y, which limits the columns. The other
// kernels compute groups of 16 tiles, of 16 or more rows each, which limits the
// rows.
constexpr int64_t kMostColumns = 65535 * 32;
constexpr int64_t kMostRows = 65535 * 16 * 16;

// Returns an error for layouts, types and sizes that the device does not
// support.
absl::Status CheckDevice(DeviceKind device, const MatmulParams& params) {
  KVASIR_RETURN_IF_ERROR(CheckActivations(kKernels.op, device, params.dtype));
  const WeightLayout layout = params.weight.layout;
  if (device == DeviceKind::kCpu) {
    if (layout != WeightLayout::kPanels32) {
      return absl::InvalidArgumentError(
          "matmul: the weight must be in panels of 32 columns on the CPU, not "
          "in rows");
    }
    if (params.y_dtype != DType::kF32) {
      return absl::InvalidArgumentError(
          absl::StrCat("matmul: y must be float32 on the CPU, not ",
                       DTypeName(params.y_dtype)));
    }
    return absl::OkStatus();
  }
  if (layout != WeightLayout::kRows) {
    return absl::InvalidArgumentError(
        "matmul: the weight must be in rows on a GPU, not in panels of 32 "
        "columns");
  }
  if (params.y_dtype != DType::kF32 && params.y_dtype != params.dtype) {
    return absl::UnimplementedError(absl::StrCat(
        "matmul: on a GPU, y must be F32 or have the type of the activations (",
        DTypeName(params.dtype), "), but is ", DTypeName(params.y_dtype)));
  }
  if (params.weight.n > kMostColumns) {
    return absl::UnimplementedError(
        absl::StrCat("matmul: a GPU supports a weight of at most ",
                     kMostColumns, " columns, not ", params.weight.n));
  }
  if (params.num_rows > kMostRows) {
    return absl::UnimplementedError(
        absl::StrCat("matmul: a GPU supports at most ", kMostRows,
                     " rows of x, not ", params.num_rows));
  }
  return absl::OkStatus();
}

// Returns the library that computes this product, or null if our own kernels
// compute it. The types, strides and alignment of a matrix never change after
// load, so every step makes the same choice.
GemmLibrary* LibraryFor(Stream& stream, const MatmulParams& params) {
  GemmLibrary* const gemms =
      static_cast<LaunchStream&>(stream).launcher().gemms();
  if (gemms == nullptr || params.dtype == DType::kF32 ||
      params.weight.dtype != params.dtype) {
    return nullptr;
  }
  const auto whole = [](uint64_t bytes) { return bytes % kGemmAlignment == 0; };
  const auto whole_rows = [&whole](int64_t stride, DType dtype) {
    return whole(static_cast<uint64_t>(stride * DTypeBytes(dtype)));
  };
  bool serves = whole_rows(params.weight.k, params.dtype) &&
                whole_rows(params.x_row_stride, params.dtype) &&
                whole_rows(params.y_row_stride, params.y_dtype);
  ForAddresses(params, [&](const void* address) {
    serves = serves && whole(reinterpret_cast<uintptr_t>(address));
  });
  return serves ? gemms : nullptr;
}

}  // namespace

absl::Status Matmul(Stream& stream, const MatmulParams& params,
                    Workspace& workspace) {
  KVASIR_RETURN_IF_ERROR(CheckDevice(stream.device(), params));
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
  Workspace::Scope scope(&workspace);
  // Null on a GPU if our own kernels multiply, because they need only
  // shared memory.
  DevicePtr<float> scratch;
  if (stream.device() == DeviceKind::kCpu) {
    scratch = workspace.Take<float>(MatmulScratch(ScratchThreads(stream)));
  } else if (GemmLibrary* const gemms = LibraryFor(stream, params);
             gemms != nullptr) {
    scratch = workspace
                  .Take<std::byte>(kGemmWorkspaceAlignment +
                                   GemmBiasBytes(n, params.y_dtype) +
                                   gemms->workspace_bytes())
                  .as<float>();
  }
  if (workspace.counting()) return CheckServed(kKernels, stream);
  if (!workspace.status().ok()) return workspace.status();
  if (params.num_rows == 0) return absl::OkStatus();
  return Launch(kKernels, stream, params, scratch);
}

}  // namespace kvasir::kernels
