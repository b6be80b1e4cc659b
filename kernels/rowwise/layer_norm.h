// layer_norm: each row less its mean, over its deviation, with the residual
// addition that precedes it. C++17.
#pragma once

#include <cstdint>

#include "kernels/device/device_ptr.h"
#include "kernels/device/dtype.h"

namespace kvasir::kernels {

// If residual: x[t, :] += residual[t, :] first (stored).
// If out: with mean = sum_i x[t, i] / M and d[i] = x[t, i] - mean,
//   out[t, i] = fma(d[i] * inv, weight[i], bias[i]),
//   inv = 1 / sqrt(sum_i d[i]^2 / M + eps).
// Both sums run over 16 lanes and one fixed tree (scalar_math.h).
template <template <typename> class Ptr>
struct LayerNormParamsIn {
  Ptr<float> x = nullptr;               // [T, M], written only with residual
  Ptr<const float> residual = nullptr;  // [T, M] or null
  Ptr<const float> weight = nullptr;    // [M]
  Ptr<const float> bias = nullptr;      // [M]
  Ptr<float> out = nullptr;  // [T, M], may be x; null: only the addition
  int64_t num_rows = 0;      // T
  int64_t columns = 0;       // M
  float eps = 1e-5f;
  DType dtype = DType::kF32;  // of activations

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(x, residual, weight, bias, out);
  }
};
using LayerNormParams = LayerNormParamsIn<DevicePtr>;
using LayerNormArgs = LayerNormParamsIn<LaunchPtr>;

class CpuStream;
void LayerNormReference(const LayerNormArgs& params, CpuStream& stream);
void LayerNormSimd(const LayerNormArgs& params, CpuStream& stream);

}  // namespace kvasir::kernels
