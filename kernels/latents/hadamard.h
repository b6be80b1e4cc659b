// hadamard: multiplies latents by the normalised Hadamard matrix of their width
// (base/hadamard.h), or by its transpose. C++17.
#pragma once

#include <cstdint>

#include "kernels/device/device_ptr.h"
#include "kernels/device/dtype.h"

namespace kvasir::kernels {

// A diagonal block K (x) S of the matrix. K has order `kernel_order`; S is
// Sylvester's matrix of order `order` / `kernel_order`, a power of two.
struct HadamardBlock {
  int64_t order = 0;
  int64_t kernel_order = 1;
  // The entries of K, +1 and -1. Lines are `stride` apart. Number a of line b
  // is K[a, b] in `columns` and K[b, a] in `rows`; from a = kernel_order on it
  // is zero. Null if kernel_order is 1.
  const float* columns = nullptr;
  const float* rows = nullptr;
  int64_t stride = 0;  // a multiple of 16
};

// The latent of a group. Its channels begin at `column` of a row of x and y.
struct HadamardLatent {
  int64_t column = 0;
  const HadamardBlock* blocks = nullptr;  // orders add up to the width
  int64_t num_blocks = 0;
};

// y = H x for every latent of every row, or y = H^T x. For a block of order
// n = k m, where channel a m + p is (a, p):
//   1. for s = m/2, m/4, ..., 1 and all p without bit s:
//        (z[a, p], z[a, p + s]) = (z[a, p] + z[a, p + s],
//                                  z[a, p] - z[a, p + s])
//   2. if k > 1: acc = 0; for b = 0 .. k - 1: acc = acc + K[a, b] z[b, p]
//      (transposed: K[b, a])
//   3. y[a, p] = acc * float(1 / sqrt(n))
// All in float32, so the bits depend only on the latent.
template <template <typename> class Ptr>
struct HadamardParamsIn {
  Ptr<const float> x = nullptr;  // [T, ...], rows x_row_stride apart
  int64_t x_row_stride = 0;      // in elements
  Ptr<float> y = nullptr;        // like x, or x itself
  int64_t y_row_stride = 0;      // in elements
  int64_t num_rows = 0;          // T
  Ptr<const HadamardLatent> latents = nullptr;
  int64_t num_latents = 0;
  bool transposed = false;
  int64_t scratch_floats = 0;  // per thread: twice the largest block
  DType dtype = DType::kF32;   // type of activations

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(x, y, latents);
  }
};
using HadamardParams = HadamardParamsIn<DevicePtr>;
using HadamardArgs = HadamardParamsIn<LaunchPtr>;

// The most floats of a block (scratch_floats / 2) that the GPU kernel accepts,
// because it keeps them in shared memory.
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
