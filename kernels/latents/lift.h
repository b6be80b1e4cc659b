// lift and complex_lift: what moves a latent's lift away from the cache, to the
// query before attention or to what comes out behind it. C++17.
#pragma once

#include <cstdint>

#include "kernels/device/device_ptr.h"
#include "kernels/device/dtype.h"
#include "kernels/linear/matmul.h"
#include "kernels/rowwise/rope.h"

namespace kvasir::kernels {

// Query head h takes the matrix A_j, [in, out], of its KV head
// j = h / (Hq / Hkv): in = D, out = R' moves a key's lift to the query
// (PackAsTheyLie packs `up`), in = R', out = D applies a value's
// (PackRows does). Groups of unlike ranks have matrices of unlike sizes.
//   y[t, column_out[h] + n] = chain(t, h, n), where chain is
//   acc = 0; for k = 0 .. in - 1:
//     acc = fma(x[t, column_in[h] + k], A_j[k, n], acc)
// in float32: the same bits for any number of rows, heads or threads. A GPU
// takes that chain too, but where x and all matrices are of one 16-bit type:
// there acc gets 16 products at a time, in the order of k (lift_cuda.cu).
template <template <typename> class Ptr>
struct LiftParamsIn {
  Ptr<const float> x = nullptr;  // [T, ...], rows x_row_stride apart
  int64_t x_row_stride = 0;      // in elements
  Ptr<float> y = nullptr;        // [T, ...], no column that is read
  int64_t y_row_stride = 0;      // in elements
  int64_t first_row = 0;         // of those that are lifted
  int64_t num_rows = 0;          // T
  int64_t num_heads = 0;         // Hq
  int64_t num_kv_heads = 0;      // Hkv, divides Hq
  // [Hkv], in the device's layout.
  Ptr<const PackedMatrixIn<Ptr>> matrices = nullptr;
  Ptr<const int64_t> column_in = nullptr;   // [Hq]
  Ptr<const int64_t> column_out = nullptr;  // [Hq]
  DType dtype = DType::kF32;                // of activations
  // Prepare's, of the matrices: the widest one's, and whether all are of dtype.
  int64_t most_columns = 0;
  bool one_type = false;

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(x, y, matrices, column_in, column_out);
  }
};
using LiftParams = LiftParamsIn<DevicePtr>;
using LiftArgs = LiftParamsIn<LaunchPtr>;

// The complex channels of a KV head: channel c takes pair pairs[c] of the query
// and multiplies it by the conjugate of u_c = up[0, c] + i up[1, c].
template <template <typename> class Ptr>
struct ComplexChannelsIn {
  int64_t num_channels = 0;        // C
  const int32_t* pairs = nullptr;  // [C], below num_pairs
  Ptr<const float> up = nullptr;   // [2, C]; null: u = 1, the pair as it is
};
using ComplexChannels = ComplexChannelsIn<DevicePtr>;
using ComplexChannelsArgs = ComplexChannelsIn<LaunchPtr>;

// Of query head h, whose pair f is (a, b) where `pairing` says, and channel c
// of its KV head, f = pairs[c]:
//   re = fma(a, up[0, c], b * up[1, c]), im = fma(b, up[0, c], -(a * up[1, c]))
// (a and b themselves without `up`), laid out as a head of C pairs (re, im):
// kHalfSplit is C real parts, then C imaginary ones.
template <template <typename> class Ptr>
struct ComplexLiftParamsIn {
  Ptr<const float> x = nullptr;  // [T, ...], rows x_row_stride apart
  int64_t x_row_stride = 0;      // in elements
  Ptr<float> y = nullptr;        // [T, ...], no column that is read
  int64_t y_row_stride = 0;      // in elements
  int64_t first_row = 0;         // of those that are lifted
  int64_t num_rows = 0;          // T
  int64_t num_heads = 0;         // Hq
  int64_t num_kv_heads = 0;      // Hkv, divides Hq
  Ptr<const ComplexChannelsIn<Ptr>> channels = nullptr;  // [Hkv]
  Ptr<const int64_t> column_in = nullptr;                // [Hq]
  Ptr<const int64_t> column_out = nullptr;               // [Hq]
  int64_t num_pairs = 0;                                 // of a query head
  RopePairing pairing = RopePairing::kHalfSplit;
  RopePairing out_pairing = RopePairing::kHalfSplit;
  DType dtype = DType::kF32;  // of activations

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(x, y, channels, column_in, column_out);
  }
};
using ComplexLiftParams = ComplexLiftParamsIn<DevicePtr>;
using ComplexLiftArgs = ComplexLiftParamsIn<LaunchPtr>;

// What a step gives to either op: x and y from row 0 on, wherever the rows that
// are lifted begin.
struct LiftRows {
  DevicePtr<const float> x;
  DevicePtr<float> y;
  int64_t first_row = 0;
  int64_t num_rows = 0;
};

class CpuStream;
void LiftReference(const LiftArgs& params, float* scratch, CpuStream& stream);
void LiftSimd(const LiftArgs& params, float* scratch, CpuStream& stream);
// Floats of scratch that either takes for `threads` threads.
int64_t LiftScratch(int threads);
void ComplexLiftReference(const ComplexLiftArgs& params, CpuStream& stream);
void ComplexLiftSimd(const ComplexLiftArgs& params, CpuStream& stream);

}  // namespace kvasir::kernels
