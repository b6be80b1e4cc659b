// hadamard: multiplies latents by the normalised Hadamard matrix of their width
// (base/hadamard.h), or by its transpose. C++17.
#pragma once

#include <cstdint>

#include "kernels/device/device_ptr.h"
#include "kernels/device/dtype.h"

namespace kvasir::kernels {

// A block on the diagonal of the matrix: the Kronecker product K (x) S. K is a
// matrix of order `kernel_order` (the kernel); S is Sylvester's matrix of order
// `order` / `kernel_order`, which is a power of two.
struct HadamardBlock {
  int64_t order = 0;
  int64_t kernel_order = 1;
  // The entries of K (+1 or -1) are stored twice. Row b of the array `columns`
  // is column b of K, and row b of the array `rows` is row b of K. The rows of
  // both arrays are padded with zeros to `stride` floats. Both are null if
  // kernel_order is 1.
  const float* columns = nullptr;
  const float* rows = nullptr;
  int64_t stride = 0;  // a multiple of 16
};

// The latent of a group. Its channels begin at `column` of a row of x and y.
struct HadamardLatent {
  int64_t column = 0;
  const HadamardBlock* blocks = nullptr;  // their orders add up to the width
  int64_t num_blocks = 0;
};

// y = H x for every latent x of every row, or y = H^T x. For a block of order
// n = k m, with k = kernel_order, (a, p) stands for channel a m + p. z starts
// as the block's part of x.
//   1. for s = m/2, m/4, ..., 1 and all p in which the bit of value s is 0:
//        (z[a, p], z[a, p + s]) = (z[a, p] + z[a, p + s],
//                                  z[a, p] - z[a, p + s])
//   2. if k > 1: acc = 0; for b = 0 .. k - 1: acc = acc + K[a, b] z[b, p]
//      (transposed: K[b, a])
//   3. y[a, p] = acc * float(1 / sqrt(n))
// Everything is computed in float32 in this order, so the bits of y depend only
// on the latent.
template <template <typename> class Ptr>
struct HadamardParamsIn {
  Ptr<const float> x = nullptr;  // [T, ...], rows x_row_stride apart
  int64_t x_row_stride = 0;      // in elements
  Ptr<float> y = nullptr;        // has the shape of x, and may be x
  int64_t y_row_stride = 0;      // in elements
  int64_t num_rows = 0;          // T
  Ptr<const HadamardLatent> latents = nullptr;
  int64_t num_latents = 0;
  bool transposed = false;
  // floats per thread: twice the order of the largest block
  int64_t scratch_floats = 0;
  DType dtype = DType::kF32;  // type of activations

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(x, y, latents);
  }
};
using HadamardParams = HadamardParamsIn<DevicePtr>;
using HadamardArgs = HadamardParamsIn<LaunchPtr>;

// The largest order of a block for the GPU kernel, which keeps the block in
// shared memory.
inline constexpr int64_t kCudaHadamardFloats = int64_t{12} << 10;

// The arguments that change with every step.
struct HadamardRows {
  DevicePtr<const float> x;
  DevicePtr<float> y;
  int64_t num_rows = 0;
};

class CpuStream;
void HadamardReference(const HadamardArgs& params, float* scratch,
                       CpuStream& stream);
void HadamardSimd(const HadamardArgs& params, float* scratch,
                  CpuStream& stream);

}  // namespace kvasir::kernels
