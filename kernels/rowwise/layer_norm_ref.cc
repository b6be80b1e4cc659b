#include <cmath>

#include "kernels/device/stream.h"
#include "kernels/rowwise/layer_norm.h"
#include "kernels/simd/scalar_math.h"

namespace kvasir::kernels {

void LayerNormReference(const LayerNormArgs& params, CpuStream&) {
  const int64_t m = params.columns;
  for (int64_t t = 0; t < params.num_rows; ++t) {
    float* x = params.x + t * m;
    if (params.residual != nullptr) {
      const float* residual = params.residual + t * m;
      for (int64_t i = 0; i < m; ++i) x[i] = x[i] + residual[i];
    }
    if (params.out == nullptr) continue;
    float lanes[kLanes] = {};
    for (int64_t i = 0; i < m; ++i) lanes[i % kLanes] += x[i];
    const float mean = TreeSum(lanes) / static_cast<float>(m);
    for (float& lane : lanes) lane = 0.0f;
    for (int64_t i = 0; i < m; ++i) {
      const float d = x[i] - mean;
      lanes[i % kLanes] = std::fma(d, d, lanes[i % kLanes]);
    }
    const float variance = TreeSum(lanes) / static_cast<float>(m);
    const float inverse = 1.0f / std::sqrt(variance + params.eps);
    float* out = params.out + t * m;
    for (int64_t i = 0; i < m; ++i) {
      out[i] =
          std::fma((x[i] - mean) * inverse, params.weight[i], params.bias[i]);
    }
  }
}

}  // namespace kvasir::kernels
