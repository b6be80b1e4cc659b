#include "kernels/parallel.h"
#include "kernels/rope.h"
#include "kernels/stream.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/rope_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {
namespace {

// Cosines and sines of one position; the remainders are made by integer
// arithmetic in `cosines` first.
void Angles(const RopeParams& params, int64_t position, uint32_t* quarters,
            float* cosines, float* sines) {
  const int64_t pairs = params.rotary_dim / 2;
  for (int64_t f = 0; f < pairs; ++f) {
    const ReducedAngle angle =
        ReduceTurns(params.steps[f] * static_cast<uint64_t>(position));
    quarters[f] = angle.quarter;
    cosines[f] = angle.remainder;
  }
  namespace c = trig_constants;
  int64_t f = 0;
  for (; f + kVecLanes <= pairs; f += kVecLanes) {
    const Vec r = LoadFloats(cosines + f);
    const Vec z = hn::Mul(r, r);
    Vec s = Fma(Broadcast(c::kS3), z, Broadcast(c::kS2));
    s = Fma(s, z, Broadcast(c::kS1));
    hn::StoreU(Fma(hn::Mul(s, z), r, r), kFloats, sines + f);
    Vec k = Fma(Broadcast(c::kC3), z, Broadcast(c::kC2));
    k = Fma(k, z, Broadcast(c::kC1));
    const Vec half = Fma(Broadcast(-0.5f), z, Broadcast(1.0f));
    hn::StoreU(Fma(hn::Mul(k, z), z, half), kFloats, cosines + f);
  }
  for (; f < pairs; ++f) SinCosReduced(cosines[f], &sines[f], &cosines[f]);
  for (f = 0; f < pairs; ++f) {
    float sine, cosine;
    RotateByQuarter(quarters[f], sines[f], cosines[f], &sine, &cosine);
    cosines[f] = cosine * params.attention_factor;
    sines[f] = sine * params.attention_factor;
  }
}

void RotateHalves(float* head, int64_t pairs, const float* cosines,
                  const float* sines) {
  int64_t f = 0;
  for (; f + kVecLanes <= pairs; f += kVecLanes) {
    const Vec a = LoadFloats(head + f);
    const Vec b = LoadFloats(head + pairs + f);
    const Vec c = LoadFloats(cosines + f);
    const Vec s = LoadFloats(sines + f);
    hn::StoreU(Fma(a, c, hn::Neg(hn::Mul(b, s))), kFloats, head + f);
    hn::StoreU(Fma(b, c, hn::Mul(a, s)), kFloats, head + pairs + f);
  }
  for (; f < pairs; ++f) {
    const float a = head[f];
    const float b = head[pairs + f];
    head[f] = std::fma(a, cosines[f], -(b * sines[f]));
    head[pairs + f] = std::fma(b, cosines[f], a * sines[f]);
  }
}

void RotateNeighbours(float* head, int64_t pairs, const float* cosines,
                      const float* sines) {
  int64_t f = 0;
#if HWY_TARGET != HWY_SCALAR
  for (; f + kVecLanes <= pairs; f += kVecLanes) {
    Vec a, b;
    hn::LoadInterleaved2(kFloats, head + 2 * f, a, b);
    const Vec c = LoadFloats(cosines + f);
    const Vec s = LoadFloats(sines + f);
    hn::StoreInterleaved2(Fma(a, c, hn::Neg(hn::Mul(b, s))),
                          Fma(b, c, hn::Mul(a, s)), kFloats, head + 2 * f);
  }
#endif
  for (; f < pairs; ++f) {
    const float a = head[2 * f];
    const float b = head[2 * f + 1];
    head[2 * f] = std::fma(a, cosines[f], -(b * sines[f]));
    head[2 * f + 1] = std::fma(b, cosines[f], a * sines[f]);
  }
}

void RotateRow(const RopeTensor& tensor, const RopeParams& params, int64_t t,
               const float* cosines, const float* sines) {
  if (tensor.data == nullptr) return;
  const int64_t pairs = params.rotary_dim / 2;
  for (int64_t h = 0; h < tensor.num_heads; ++h) {
    float* head = tensor.data + t * tensor.row_stride + h * tensor.head_dim;
    if (params.pairing == RopePairing::kHalfSplit) {
      RotateHalves(head, pairs, cosines, sines);
    } else {
      RotateNeighbours(head, pairs, cosines, sines);
    }
  }
}

void RotateRows(const RopeParams& params, int64_t begin, int64_t end,
                float* scratch) {
  const int64_t pairs = params.rotary_dim / 2;
  float* cosines = scratch;
  float* sines = cosines + pairs;
  auto* quarters = reinterpret_cast<uint32_t*>(sines + pairs);
  for (int64_t t = begin; t < end; ++t) {
    Angles(params, params.positions[t], quarters, cosines, sines);
    RotateRow(params.q, params, t, cosines, sines);
    RotateRow(params.k, params, t, cosines, sines);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvasir::kernels {
namespace {
HWY_EXPORT(RotateRows);
}  // namespace

void RopeSimd(const RopeParams& params, float* scratch, CpuStream& stream) {
  const int64_t numbers = params.q.num_heads * params.q.head_dim +
                          params.k.num_heads * params.k.head_dim;
  ForRows(stream, params.num_tokens, numbers,
          [&](int64_t begin, int64_t end, int thread) {
            HWY_DYNAMIC_DISPATCH(RotateRows)
            (params, begin, end, scratch + thread * RopeScratch(params));
          });
}

}  // namespace kvasir::kernels
#endif  // HWY_ONCE
