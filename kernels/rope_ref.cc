#include <cmath>

#include "kernels/rope.h"
#include "kernels/scalar_math.h"
#include "kernels/stream.h"

namespace kvasir::kernels {
namespace {

void Rotate(const RopeTensor& tensor, const RopeParams& params, int64_t t,
            const float* cosines, const float* sines) {
  if (tensor.data == nullptr) return;
  const int64_t pairs = params.rotary_dim / 2;
  const bool half_split = params.pairing == RopePairing::kHalfSplit;
  for (int64_t h = 0; h < tensor.num_heads; ++h) {
    float* head = tensor.data + t * tensor.row_stride + h * tensor.head_dim;
    for (int64_t f = 0; f < pairs; ++f) {
      float* first = head + (half_split ? f : 2 * f);
      float* second = head + (half_split ? f + pairs : 2 * f + 1);
      const float a = *first;
      const float b = *second;
      *first = std::fma(a, cosines[f], -(b * sines[f]));
      *second = std::fma(b, cosines[f], a * sines[f]);
    }
  }
}

}  // namespace

void RopeReference(const RopeParams& params, float* scratch, CpuStream&) {
  const int64_t pairs = params.rotary_dim / 2;
  float* cosines = scratch;
  float* sines = scratch + pairs;
  for (int64_t t = 0; t < params.num_tokens; ++t) {
    for (int64_t f = 0; f < pairs; ++f) {
      const ReducedAngle angle = ReduceTurns(
          params.steps[f] * static_cast<uint64_t>(params.positions[t]));
      float sine, cosine;
      SinCosReduced(angle.remainder, &sine, &cosine);
      RotateByQuarter(angle.quarter, sine, cosine, &sine, &cosine);
      cosines[f] = cosine * params.attention_factor;
      sines[f] = sine * params.attention_factor;
    }
    Rotate(params.q, params, t, cosines, sines);
    Rotate(params.k, params, t, cosines, sines);
  }
}

}  // namespace kvasir::kernels
