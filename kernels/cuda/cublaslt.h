// CublasLt: an interface to the functions of cuBLASLt that the CUDA back end
// calls. Tests without a GPU implement it by a fake.
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

// The properties of a product (Gemm) on which the choice of its algorithm
// depends. Addresses do not matter, because all memory is aligned as
// gemm.h requires.
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

// Threads: all methods may be called from any thread, even with the same
// handle at the same time. They use the device that the calling thread has
// selected by Runtime::Use.
class CublasLt {
 public:
  virtual ~CublasLt() = default;

  // The name and number of an error, for example "CUBLAS_STATUS_NOT_SUPPORTED
  // (15)".
  virtual std::string Describe(CublasResult result) = 0;
  // The library's version: 10000 * major + 100 * minor + patch.
  virtual int64_t Version() = 0;
  virtual CublasResult MakeHandle(CublasHandle* handle) = 0;
  virtual CublasResult DestroyHandle(CublasHandle handle) = 0;
  // Chooses the algorithm that the library considers best. The algorithm must
  // add in float32, give the same bits on every run, and need at most
  // most_workspace_bytes.
  virtual CublasResult Choose(CublasHandle handle, const GemmShape& shape,
                              size_t most_workspace_bytes,
                              GemmAlgorithm* algorithm) = 0;
  // Enqueues a product. `shape` must be the shape of `gemm`, and `algorithm`
  // must have been chosen for this shape on this device.
  virtual CublasResult Multiply(CublasHandle handle, const GemmShape& shape,
                                const Gemm& gemm,
                                const GemmAlgorithm& algorithm,
                                StreamHandle stream) = 0;
};

}  // namespace kvasir::kernels::cuda
