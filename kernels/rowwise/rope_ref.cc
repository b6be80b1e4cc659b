#include <cmath>

#include "kernels/device/stream.h"
#include "kernels/rowwise/rope.h"
#include "kernels/simd/scalar_math.h"

namespace kvasir::kernels {
namespace {

// The cosines and sines of one position's angles.
struct Turns {
  const float* cosines;
  const float* sines;
};

void RotateHead(RopePairing pairing, const RopeHead& head, const Turns& turns,
                float* numbers) {
  const bool half_split = pairing == RopePairing::kHalfSplit;
  for (int64_t i = 0; i < head.num_pairs; ++i) {
    const int64_t f = head.pairs != nullptr ? head.pairs[i] : i;
    float* first = numbers + (half_split ? i : 2 * i);
    float* second = numbers + (half_split ? i + head.num_pairs : 2 * i + 1);
    const float a = *first;
    const float b = *second;
    *first = std::fma(a, turns.cosines[f], -(b * turns.sines[f]));
    *second = std::fma(b, turns.cosines[f], a * turns.sines[f]);
  }
}

void Rotate(const RopeTensorArgs& tensor, const RopeArgs& params, int64_t t,
            const Turns& turns) {
  if (tensor.data == nullptr) return;
  for (int64_t h = 0; h < tensor.num_heads; ++h) {
    const RopeHead head =
        tensor.heads != nullptr
            ? tensor.heads[h]
            : RopeHead{h * tensor.head_dim, params.rotary_dim / 2, nullptr};
    RotateHead(params.pairing, head, turns,
               tensor.data + t * tensor.row_stride + head.begin);
  }
}

}  // namespace

void RopeReference(const RopeArgs& params, float* scratch, CpuStream&) {
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
    Rotate(params.q, params, t, {cosines, sines});
    Rotate(params.k, params, t, {cosines, sines});
  }
}

}  // namespace kvasir::kernels
