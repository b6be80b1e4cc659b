// norm: adds a residual to each row and applies the root-mean-square norm or
// the layer norm. C++17.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "kernels/device/device_ptr.h"
#include "kernels/device/dtype.h"

namespace kvasir::kernels {

enum class NormKind {
  kRms,    // divides each row by its root mean square
  kLayer,  // subtracts each row's mean and divides by its standard deviation
};

// If there is a residual, it is first added to x: x[t, :] += residual[t, :].
//
// kRms: out[t, i] = (x[t, i] * inv) * weight[i], with
//   inv = 1 / sqrt(sum_i x[t, i]^2 / M + eps)
//
// kLayer: out[t, i] = fma(d[i] * inv, weight[i], bias[i]), with
//   mean = sum_i x[t, i] / M, d[i] = x[t, i] - mean and
//   inv = 1 / sqrt(sum_i d[i]^2 / M + eps)
//
// The order of additions in a sum depends only on M and dtype. A CPU adds in 16
// lanes, and then adds the lanes in a fixed tree (scalar_math.h).
//
// On a GPU, a row is divided into packs of 16 bytes if the size of a row and
// the field `stride` are multiples of 16 bytes. All pointers must then be
// aligned to 16 bytes. Otherwise a pack is a single number. Thread t of 256
// adds the numbers of packs t, t + 256, ... in order. Then simt::CtaSum adds
// the sums of the threads.
template <template <typename> class Ptr>
struct NormParamsIn {
  // [T, M], written only if there is a residual
  Ptr<float> x = nullptr;
  Ptr<const float> residual = nullptr;  // [T, M] or null
  Ptr<const float> weight = nullptr;    // [M]
  Ptr<const float> bias = nullptr;      // [M], only for kLayer
  Ptr<float> out = nullptr;             // [T, M], may be x; null: no norm
  int64_t num_rows = 0;                 // T
  int64_t columns = 0;                  // M
  NormKind kind = NormKind::kRms;
  float eps = 1e-5f;
  DType dtype = DType::kF32;  // the type of activations
  // The next two fields are for rows that are parts of longer rows, like the
  // heads of a token (QK-norm). A longer row has `num_parts` rows of M numbers,
  // and longer rows begin `stride` numbers apart. T then counts all rows. A
  // residual is not allowed.
  int64_t num_parts = 1;
  int64_t stride = 0;  // 0: num_parts * M

  // Returns the index in x and out at which row t begins.
  KVASIR_HOST_DEVICE int64_t Begin(int64_t t) const {
    return stride == 0 ? t * columns
                       : t / num_parts * stride + t % num_parts * columns;
  }

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(x, residual, weight, bias, out);
  }
};
using NormParams = NormParamsIn<DevicePtr>;
using NormArgs = NormParamsIn<LaunchPtr>;

class CpuStream;
void NormReference(const NormArgs& params, CpuStream& stream);
void NormSimd(const NormArgs& params, CpuStream& stream);

}  // namespace kvasir::kernels
