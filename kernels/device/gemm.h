// GemmLibrary: the interface to a vendor's library for matrix products, such as
// cuBLASLt. A GPU's launcher may provide one. C++17 without Abseil, because
// device code includes this.
#pragma once

#include <cstdint>

#include "kernels/device/dtype.h"

namespace kvasir::kernels {

// A matrix product: y[t, n] = sum of x[t, k] W[n, k] over k, + bias[n], added
// in float32. The library chooses the order of the additions, which may depend
// on the number of rows. Rows of x, W and y begin at multiples of
// kGemmAlignment bytes, and there is at least one row of each.
struct Gemm {
  const void* x = nullptr;  // [rows, k], rows x_row_stride apart
  int64_t x_row_stride = 0;
  const void* weight = nullptr;  // [n, k] without gaps
  const void* bias = nullptr;    // [n] in y's type, or null
  void* y = nullptr;             // [rows, n], rows y_row_stride apart
  int64_t y_row_stride = 0;
  int64_t rows = 0;
  int64_t n = 0;
  int64_t k = 0;
  DType dtype = DType::kBf16;    // type of x and W, with 16 bits
  DType y_dtype = DType::kBf16;  // dtype or float32
  // Has GemmLibrary::workspace_bytes() bytes and begins at a multiple of
  // kGemmWorkspaceAlignment.
  void* workspace = nullptr;
};
inline constexpr int64_t kGemmAlignment = 16;
inline constexpr int64_t kGemmWorkspaceAlignment = 256;

// Multiplies matrices on one stream.
//
// Threads: only one thread at a time may use this object or its stream.
// Errors: the stream keeps an error of a product and returns it later by
// LaunchStream::TakeLaunchError.
class GemmLibrary {
 public:
  virtual ~GemmLibrary() = default;
  // The size of Gemm::workspace, which is the same for every product.
  virtual int64_t workspace_bytes() const = 0;
  virtual void Enqueue(const Gemm& gemm) = 0;
};

}  // namespace kvasir::kernels
