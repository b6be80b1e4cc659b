// rms_norm: root-mean-square norm of each row, with the residual addition that
// precedes it. C++17.
#pragma once

#include <cstdint>

#include "kernels/device/device_ptr.h"
#include "kernels/device/dtype.h"

namespace kvasir::kernels {

// If residual: x[t, :] += residual[t, :] first (stored).
// If out: out[t, i] = (x[t, i] * inv) * weight[i],
//         inv = 1 / sqrt(sum_i x[t, i]^2 / M + eps).
// The sum runs over 16 lanes and one fixed tree (scalar_math.h).
template <template <typename> class Ptr>
struct RmsNormParamsIn {
  Ptr<float> x = nullptr;               // [T, M], written only with residual
  Ptr<const float> residual = nullptr;  // [T, M] or null
  Ptr<const float> weight = nullptr;    // [M]
  Ptr<float> out = nullptr;  // [T, M], may be x; null: only the addition
  int64_t num_rows = 0;      // T
  int64_t columns = 0;       // M
  float eps = 1e-5f;
  DType dtype = DType::kF32;  // of activations

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(x, residual, weight, out);
  }
};
using RmsNormParams = RmsNormParamsIn<DevicePtr>;
using RmsNormArgs = RmsNormParamsIn<LaunchPtr>;

class CpuStream;
void RmsNormReference(const RmsNormArgs& params, CpuStream& stream);
void RmsNormSimd(const RmsNormArgs& params, CpuStream& stream);

}  // namespace kvasir::kernels
