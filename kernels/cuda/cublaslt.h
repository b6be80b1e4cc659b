// The calls of cuBLASLt that the back end makes, behind an interface, so that
// tests without a GPU can use a library of their own.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/cuda/runtime.h"
#include "kernels/device/gemm.h"

namespace kvasir::kernels::cuda {

// A cublasStatus_t as a number.
enum class CublasResult : int { kOk = 0 };

using CublasHandle = struct CublasHandleTag*;

// All that the choice of an algorithm depends on, except the device: sizes and
// types of a product of gemm.h. All memory is aligned as gemm.h requires.
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

// A cublasLtMatmulAlgo_t, and the size of the workspace that it needs.
struct GemmAlgorithm {
  uint64_t data[8] = {};
  size_t workspace_bytes = 0;
};

// Threads: all methods may be called from any thread, also for one handle. They
//   apply to the device that the calling thread uses (Runtime::Use).
class CublasLt {
 public:
  virtual ~CublasLt() = default;

  // For example "CUBLAS_STATUS_NOT_SUPPORTED (15)".
  virtual std::string Describe(CublasResult result) = 0;
  // The library's version: 10000 * major + 100 * minor + patch.
  virtual int64_t Version() = 0;
  virtual CublasResult MakeHandle(CublasHandle* handle) = 0;
  virtual CublasResult DestroyHandle(CublasHandle handle) = 0;
  // Chooses the algorithm that the library considers best among those that add
  // in float32, give the same bits on every run, and need at most this
  // workspace.
  virtual CublasResult Choose(CublasHandle handle, const GemmShape& shape,
                              size_t most_workspace_bytes,
                              GemmAlgorithm* algorithm) = 0;
  // `shape` is the shape of `gemm`; `algorithm` was chosen for it on this
  // device.
  virtual CublasResult Multiply(CublasHandle handle, const GemmShape& shape,
                                const Gemm& gemm,
                                const GemmAlgorithm& algorithm,
                                StreamHandle stream) = 0;
};

}  // namespace kvasir::kernels::cuda
