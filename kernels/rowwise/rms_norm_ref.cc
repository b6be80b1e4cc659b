#include <cmath>

#include "kernels/device/stream.h"
#include "kernels/rowwise/rms_norm.h"
#include "kernels/simd/scalar_math.h"

namespace kvasir::kernels {

void RmsNormReference(const RmsNormArgs& params, CpuStream&) {
  const int64_t m = params.columns;
  for (int64_t t = 0; t < params.num_rows; ++t) {
    float* x = params.x + t * m;
    if (params.residual != nullptr) {
      const float* residual = params.residual + t * m;
      for (int64_t i = 0; i < m; ++i) x[i] = x[i] + residual[i];
    }
    if (params.out == nullptr) continue;
    float lanes[kLanes] = {};
    for (int64_t i = 0; i < m; ++i) {
      lanes[i % kLanes] = std::fma(x[i], x[i], lanes[i % kLanes]);
    }
    const float mean = TreeSum(lanes) / static_cast<float>(m);
    const float inverse = 1.0f / std::sqrt(mean + params.eps);
    float* out = params.out + t * m;
    for (int64_t i = 0; i < m; ++i) {
      out[i] = (x[i] * inverse) * params.weight[i];
    }
  }
}

}  // namespace kvasir::kernels
