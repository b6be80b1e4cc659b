// matmul: y = x W + bias, for any number of rows. The weights W are packed when
// they are loaded. C++17.
#pragma once

#include <cstdint>

#include "kernels/device/device_ptr.h"
#include "kernels/device/dtype.h"
#include "kernels/device/weight_layout.h"

namespace kvasir::kernels {

// The number of W's columns that are stored side by side in one packed panel:
// two AVX-512 vectors of float32.
inline constexpr int64_t kPanelColumns = 32;

// A view of a weight W [K, N], the transpose of the matrix in a checkpoint, in
// the dtype of the checkpoint. In the layout kPanels32, element (k, n) is at
// index ((n / 32) * K + k) * 32 + n % 32; zeros fill the last panel. In the
// layout kRows, it is at index n * K + k.
template <template <typename> class Ptr>
struct PackedMatrixIn {
  // [ceil(n / 32), k, 32] or [n, k], 64-byte aligned.
  Ptr<const void> data = nullptr;
  int64_t k = 0;
  int64_t n = 0;
  DType dtype = DType::kF32;
  WeightLayout layout = WeightLayout::kPanels32;

  int64_t num_panels() const { return (n + kPanelColumns - 1) / kPanelColumns; }
  int64_t bytes() const {
    const int64_t columns =
        layout == WeightLayout::kRows ? n : num_panels() * kPanelColumns;
    return columns * k * DTypeBytes(dtype);
  }
  // Returns a view of columns [begin, begin + count). In panels, begin must be
  // a multiple of 32.
  PackedMatrixIn Columns(int64_t begin, int64_t count) const {
    PackedMatrixIn part = *this;
    part.data = OffsetBytes(data, begin * k * DTypeBytes(dtype));
    part.n = count;
    return part;
  }
};

using PackedMatrix = PackedMatrixIn<DevicePtr>;
using PackedMatrixArgs = PackedMatrixIn<LaunchPtr>;

// y[t, n] = chain(t, n) + bias[n]. The chain has one fused multiply-add (fma)
// in float32 for each k:
//   acc = 0; for k = 0 .. K-1: acc = fma(x[t, k], W[k, n], acc)
// The bits of the result are the same for any number of rows, threads or
// SIMD lanes.
//
// A GPU computes the same chain unless x and W have the same 16-bit type. Then
// 16 products at a time are added to acc, in the order of k (matmul_cuda.cu).
// But if the launcher also has a library for products (device/gemm.h), and rows
// of x, W and y begin at multiples of 16 bytes, the library computes the
// product. It adds in its own order, and the bias is first rounded to y's type.
template <template <typename> class Ptr>
struct MatmulParamsIn {
  Ptr<const float> x = nullptr;  // [T, K], rows x_row_stride apart
  int64_t x_row_stride = 0;      // in elements
  int64_t num_rows = 0;          // T
  PackedMatrixIn<Ptr> weight;
  Ptr<const float> bias = nullptr;  // [N] or null
  Ptr<float> y = nullptr;           // [T, N], rows y_row_stride apart
  int64_t y_row_stride = 0;         // in elements
  DType dtype = DType::kF32;        // the type of x
  DType y_dtype = DType::kF32;      // the type of y: float32 or x's type

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(x, weight.data, bias, y);
  }
};
using MatmulParams = MatmulParamsIn<DevicePtr>;
using MatmulArgs = MatmulParamsIn<LaunchPtr>;

// Returns the bytes of scratch for a copy of the bias in y's type; 0 if y is
// float32. In the scratch, the library's workspace follows this copy. On a GPU,
// only products that the library computes need scratch.
constexpr int64_t GemmBiasBytes(int64_t n, DType y_dtype) {
  return y_dtype == DType::kF32 ? 0
                                : (n * DTypeBytes(y_dtype) + 255) / 256 * 256;
}

class CpuStream;
void MatmulReference(const MatmulArgs& params, float* scratch,
                     CpuStream& stream);
void MatmulSimd(const MatmulArgs& params, float* scratch, CpuStream& stream);
// Returns the number of floats of scratch that `threads` threads need, for both
// back ends of the CPU.
int64_t MatmulScratch(int threads);

}  // namespace kvasir::kernels
