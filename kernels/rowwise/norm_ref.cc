#include <cmath>

#include "kernels/device/stream.h"
#include "kernels/rowwise/norm.h"
#include "kernels/simd/scalar_math.h"

namespace kvasir::kernels {
namespace {

void RmsNormRow(const NormArgs& params, const float* x, float* out) {
  const int64_t m = params.columns;
  float lanes[kLanes] = {};
  for (int64_t i = 0; i < m; ++i) {
    lanes[i % kLanes] = std::fma(x[i], x[i], lanes[i % kLanes]);
  }
  const float mean = TreeSum(lanes) / static_cast<float>(m);
  const float inverse = 1.0f / std::sqrt(mean + params.eps);
  for (int64_t i = 0; i < m; ++i) out[i] = (x[i] * inverse) * params.weight[i];
}

void LayerNormRow(const NormArgs& params, const float* x, float* out) {
  const int64_t m = params.columns;
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
  for (int64_t i = 0; i < m; ++i) {
    out[i] =
        std::fma((x[i] - mean) * inverse, params.weight[i], params.bias[i]);
  }
}

}  // namespace

void NormReference(const NormArgs& params, CpuStream&) {
  const int64_t m = params.columns;
  for (int64_t t = 0; t < params.num_rows; ++t) {
    float* x = params.x + params.Begin(t);
    if (params.residual != nullptr) {
      const float* residual = params.residual + t * m;
      for (int64_t i = 0; i < m; ++i) x[i] = x[i] + residual[i];
    }
    if (params.out == nullptr) continue;
    const auto row = params.kind == NormKind::kRms ? RmsNormRow : LayerNormRow;
    row(params, x, params.out + params.Begin(t));
  }
}

}  // namespace kvasir::kernels
