// The calls of cuBLASLt that the back end makes, behind an interface: what is
// made of them runs in tests where there is no GPU, over a library of theirs.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/cuda/runtime.h"
#include "kernels/device/gemm.h"

namespace kvasir::kernels::cuda {

// A cublasStatus_t by its number.
enum class CublasResult : int { kOk = 0 };

using CublasHandle = struct CublasHandleTag*;

// All that a choice of algorithm depends on, beside the device: gemm.h's
// products by sizes and types. Memory is aligned as gemm.h says.
struct GemmShape {
  int64_t rows = 0;
  int64_t n = 0;
  int64_t k = 0;
  int64_t x_row_stride = 0;
  int64_t y_row_stride = 0;
  DType dtype = DType::kBf16;
  DType y_dtype = DType::kBf16;
  bool bias = false;

  auto operator<=>(const GemmShape&) const = default;
};

// A cublasLtMatmulAlgo_t, and what it needs.
struct GemmAlgorithm {
  uint64_t data[8] = {};
  size_t workspace_bytes = 0;
};

// Threads: all methods may be called from any thread, for one handle too. They
//   are for the device that the calling thread uses (Runtime::Use).
class CublasLt {
 public:
  virtual ~CublasLt() = default;

  // "CUBLAS_STATUS_NOT_SUPPORTED (15)"
  virtual std::string Describe(CublasResult result) = 0;
  // 10000 * major + 100 * minor + patch.
  virtual int64_t Version() = 0;
  virtual CublasResult MakeHandle(CublasHandle* handle) = 0;
  virtual CublasResult DestroyHandle(CublasHandle handle) = 0;
  // The algorithm that the library takes for the best of those that sum in
  // float32, are the same bits whenever they run, and need no more workspace.
  virtual CublasResult Choose(CublasHandle handle, const GemmShape& shape,
                              size_t most_workspace_bytes,
                              GemmAlgorithm* algorithm) = 0;
  // `shape` is that of `gemm`, `algorithm` was chosen for it on this device.
  virtual CublasResult Multiply(CublasHandle handle, const GemmShape& shape,
                                const Gemm& gemm,
                                const GemmAlgorithm& algorithm,
                                StreamHandle stream) = 0;
};

}  // namespace kvasir::kernels::cuda
