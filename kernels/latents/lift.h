// lift and complex_lift. A lift is the matrix between a key or value and its
// latent. These ops do not apply it to the cached latents, but to queries
// before attention and to the results of attention. C++17.
#pragma once

#include <cstdint>

#include "kernels/device/device_ptr.h"
#include "kernels/device/dtype.h"
#include "kernels/linear/matmul.h"
#include "kernels/rowwise/rope.h"

namespace kvasir::kernels {

// Query head h uses the matrix A_j, [in, out], of its KV head j = h / (Hq /
// Hkv). If the lift of keys is applied to a query, `in` is the head size and
// `out` the width of the latent; PackAsTheyLie packs these matrices. If the
// lift of values is applied to a result, `in` is the width of the latent and
// `out` the head size; PackRows packs these. KV heads may have latents of
// different widths.
//
//   y[t, column_out[h] + n] = chain(t, h, n), where chain is
//   acc = 0; for k = 0 .. in - 1:
//     acc = fma(x[t, column_in[h] + k], A_j[k, n], acc)
// in float32. So the bits of y do not depend on the number of rows, heads or
// threads. A GPU computes the same chain, unless x and all matrices have the
// same 16-bit type. Then it adds 16 products at a time to acc, in the order of
// k (lift_cuda.cu).
template <template <typename> class Ptr>
struct LiftParamsIn {
  Ptr<const float> x = nullptr;  // [T, ...], rows x_row_stride apart
  int64_t x_row_stride = 0;      // in elements
  // [T, ...]; must not overlap columns of x that are read
  Ptr<float> y = nullptr;
  int64_t y_row_stride = 0;  // in elements
  int64_t first_row = 0;     // rows before this one are not lifted
  int64_t num_rows = 0;      // T
  int64_t num_heads = 0;     // Hq
  int64_t num_kv_heads = 0;  // Hkv, divides Hq
  // The matrix of each KV head [Hkv], in the device's layout.
  Ptr<const PackedMatrixIn<Ptr>> matrices = nullptr;
  Ptr<const int64_t> column_in = nullptr;   // [Hq]
  Ptr<const int64_t> column_out = nullptr;  // [Hq]
  DType dtype = DType::kF32;                // type of activations
  // Set by Prepare: the number of columns of the widest matrix, and whether all
  // matrices have the type `dtype`.
  int64_t most_columns = 0;
  bool one_type = false;

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(x, y, matrices, column_in, column_out);
  }
};
using LiftParams = LiftParamsIn<DevicePtr>;
using LiftArgs = LiftParamsIn<LaunchPtr>;

// The complex channels of a KV head. Channel c of the output is a complex
// number: pair pairs[c] of the query, times the conjugate of up[0, c] + i up[1,
// c].
template <template <typename> class Ptr>
struct ComplexChannelsIn {
  int64_t num_channels = 0;        // C
  const int32_t* pairs = nullptr;  // [C], below num_pairs
  Ptr<const float> up = nullptr;   // [2, C]; null: pairs are copied
};
using ComplexChannels = ComplexChannelsIn<DevicePtr>;
using ComplexChannelsArgs = ComplexChannelsIn<LaunchPtr>;

// For query head h and channel c of its KV head, let (a, b) be pair f =
// pairs[c] of the query, as `pairing` lays pairs out:
//   re = fma(a, up[0, c], b * up[1, c]), im = fma(b, up[0, c], -(a * up[1, c]))
// Without `up`, (re, im) = (a, b). The output is a head of C pairs (re, im) as
// `out_pairing` lays them out: kHalfSplit is C real parts, then C imaginary
// ones.
template <template <typename> class Ptr>
struct ComplexLiftParamsIn {
  Ptr<const float> x = nullptr;  // [T, ...], rows x_row_stride apart
  int64_t x_row_stride = 0;      // in elements
  // [T, ...]; must not overlap columns of x that are read
  Ptr<float> y = nullptr;
  int64_t y_row_stride = 0;  // in elements
  int64_t first_row = 0;     // rows before this one are not lifted
  int64_t num_rows = 0;      // T
  int64_t num_heads = 0;     // Hq
  int64_t num_kv_heads = 0;  // Hkv, divides Hq
  Ptr<const ComplexChannelsIn<Ptr>> channels = nullptr;  // [Hkv]
  Ptr<const int64_t> column_in = nullptr;                // [Hq]
  Ptr<const int64_t> column_out = nullptr;               // [Hq]
  int64_t num_pairs = 0;  // number of pairs of a query head
  RopePairing pairing = RopePairing::kHalfSplit;
  RopePairing out_pairing = RopePairing::kHalfSplit;
  DType dtype = DType::kF32;  // type of activations

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(x, y, channels, column_in, column_out);
  }
};
using ComplexLiftParams = ComplexLiftParamsIn<DevicePtr>;
using ComplexLiftArgs = ComplexLiftParamsIn<LaunchPtr>;

// The arguments of both ops that change with every step. x and y point to row
// 0, even if first_row is another row.
struct LiftRows {
  DevicePtr<const float> x;
  DevicePtr<float> y;
  int64_t first_row = 0;
  int64_t num_rows = 0;
};

class CpuStream;
void LiftReference(const LiftArgs& params, float* scratch, CpuStream& stream);
void LiftSimd(const LiftArgs& params, float* scratch, CpuStream& stream);
// How many floats of scratch memory lift needs on a CPU with `threads` threads.
int64_t LiftScratch(int threads);
void ComplexLiftReference(const ComplexLiftArgs& params, CpuStream& stream);
void ComplexLiftSimd(const ComplexLiftArgs& params, CpuStream& stream);

}  // namespace kvasir::kernels
