// rms_norm: root-mean-square norm of each row, with the residual addition that
// precedes it. C++17.
#pragma once

#include <cstdint>

namespace kvasir::kernels {

// If residual: x[t, :] += residual[t, :] first (stored).
// If out: out[t, i] = (x[t, i] * inv) * weight[i],
//         inv = 1 / sqrt(sum_i x[t, i]^2 / M + eps).
// The sum runs over 16 lanes and one fixed tree (scalar_math.h).
struct RmsNormParams {
  float* x = nullptr;               // [T, M], written only with residual
  const float* residual = nullptr;  // [T, M] or null
  const float* weight = nullptr;    // [M]
  float* out = nullptr;             // [T, M], may be x; null: only the addition
  int64_t num_rows = 0;             // T
  int64_t columns = 0;              // M
  float eps = 1e-5f;
};

class CpuStream;
void RmsNormReference(const RmsNormParams& params, CpuStream& stream);
void RmsNormSimd(const RmsNormParams& params, CpuStream& stream);

}  // namespace kvasir::kernels
