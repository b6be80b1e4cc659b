// norm: adds a residual to each row and applies the root-mean-square norm or
// the layer norm. C++17.
#pragma once

#include <cstdint>

#include "kernels/device/device_ptr.h"
#include "kernels/device/dtype.h"

namespace kvasir::kernels {

enum class NormKind {
  kRms,    // divides each row by its root mean square
  kLayer,  // subtracts each row's mean and divides by its standard deviation
};

// With `residual`: x[t, :] += residual[t, :] first; the sum is stored.
// With `out`, kRms: out[t, i] = (x[t, i] * inv) * weight[i], with inv = 1 /
// sqrt(sum_i x[t, i]^2 / M + eps).
// With `out`, kLayer, mean = sum_i x[t, i] / M and d[i] = x[t, i] - mean:
// out[t, i] = fma(d[i] * inv, weight[i], bias[i]), with inv = 1 / sqrt(sum_i
// d[i]^2 / M + eps).
// The order of a sum depends only on M and dtype. On a CPU it has 16 lanes and
// one fixed tree (scalar_math.h). On a GPU, thread t of 256 adds packs t, t +
// 256, ... of p columns, one number after the other; then lanes of a warp are
// added in pairs 16, 8, 4, 2, 1 apart, then the 8 warps in order. A pack is 16
// bytes if such packs divide a row, else one number. With packs of 16 bytes a
// GPU needs all pointers aligned to 16 bytes.
template <template <typename> class Ptr>
struct NormParamsIn {
  Ptr<float> x = nullptr;               // [T, M], written only with residual
  Ptr<const float> residual = nullptr;  // [T, M] or null
  Ptr<const float> weight = nullptr;    // [M]
  Ptr<const float> bias = nullptr;      // [M], only for kLayer
  Ptr<float> out = nullptr;  // [T, M], may be x; null: only the addition
  int64_t num_rows = 0;      // T
  int64_t columns = 0;       // M
  NormKind kind = NormKind::kRms;
  float eps = 1e-5f;
  DType dtype = DType::kF32;  // the type of activations

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
