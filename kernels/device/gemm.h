// Products of matrices by a library of the device's vendor: a GPU's launcher
// may have one. C++17 and free of Abseil: device code includes this.
#pragma once

#include <cstdint>

#include "kernels/device/dtype.h"

namespace kvasir::kernels {

// y[t, n] = sum of x[t, k] W[n, k] over k, + bias[n], summed in float32 in an
// order that is the library's, and may be another for other numbers of rows.
// Rows of x, W and y begin at multiples of kGemmAlignment, in bytes, and at
// least one of each is there.
struct Gemm {
  const void* x = nullptr;  // [rows, k], rows x_row_stride apart
  int64_t x_row_stride = 0;
  const void* weight = nullptr;  // [n, k] without gaps
  const void* bias = nullptr;    // [n] of y's type, or null
  void* y = nullptr;             // [rows, n], rows y_row_stride apart
  int64_t y_row_stride = 0;
  int64_t rows = 0;
  int64_t n = 0;
  int64_t k = 0;
  DType dtype = DType::kBf16;    // of x and W: one of 16 bits
  DType y_dtype = DType::kBf16;  // that, or float32
  // GemmLibrary::workspace_bytes(), at a multiple of kGemmWorkspaceAlignment.
  void* workspace = nullptr;
};
inline constexpr int64_t kGemmAlignment = 16;
inline constexpr int64_t kGemmWorkspaceAlignment = 256;

// Threads: those of its stream, one at a time.
// Errors: kept by the stream.
class GemmLibrary {
 public:
  virtual ~GemmLibrary() = default;
  // The same for every product.
  virtual int64_t workspace_bytes() const = 0;
  virtual void Enqueue(const Gemm& gemm) = 0;
};

}  // namespace kvasir::kernels
