// norm: root-mean-square norm or layer norm of each row, with the residual
// addition that precedes it. C++17.
#pragma once

#include <cstdint>

#include "kernels/device/device_ptr.h"
#include "kernels/device/dtype.h"

namespace kvasir::kernels {

enum class NormKind {
  kRms,    // each row over its root mean square
  kLayer,  // each row less its mean, over its deviation
};

// If residual: x[t, :] += residual[t, :] first (stored).
// If out, of kRms:
//   out[t, i] = (x[t, i] * inv) * weight[i],
//   inv = 1 / sqrt(sum_i x[t, i]^2 / M + eps);
// of kLayer, with mean = sum_i x[t, i] / M and d[i] = x[t, i] - mean:
//   out[t, i] = fma(d[i] * inv, weight[i], bias[i]),
//   inv = 1 / sqrt(sum_i d[i]^2 / M + eps).
// The order of a sum follows from M and dtype alone. The CPU: 16 lanes and one
// fixed tree (scalar_math.h). A GPU: thread t of 256 takes every 256th pack of
// p columns from pack t on, one number after the other; then the threads of a
// warp are added in pairs 16, 8, 4, 2, 1 apart, then the 8 warps in order. p is
// 16 bytes of numbers where those divide a row, and 1 elsewhere; where it is
// not 1, a GPU wants all pointers aligned to 16 bytes.
template <template <typename> class Ptr>
struct NormParamsIn {
  Ptr<float> x = nullptr;               // [T, M], written only with residual
  Ptr<const float> residual = nullptr;  // [T, M] or null
  Ptr<const float> weight = nullptr;    // [M]
  Ptr<const float> bias = nullptr;      // [M], of kLayer
  Ptr<float> out = nullptr;  // [T, M], may be x; null: only the addition
  int64_t num_rows = 0;      // T
  int64_t columns = 0;       // M
  NormKind kind = NormKind::kRms;
  float eps = 1e-5f;
  DType dtype = DType::kF32;  // of activations

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
