#include "kernels/parallel.h"
#include "kernels/rope.h"
#include "kernels/stream.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/rope_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/simd-inl.h"

#ifndef KVASIR_KERNELS_ROPE_ONCE_
#define KVASIR_KERNELS_ROPE_ONCE_
namespace kvasir::kernels {

// Cosines and sines of one position [rotary_dim / 2].
struct Turns {
  const float* cosines;
  const float* sines;
};

}  // namespace kvasir::kernels
#endif

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
  const hn::RebindToUnsigned<Floats> d32;
  const Vec factor = Broadcast(params.attention_factor);
  for (f = 0; f + kVecLanes <= pairs; f += kVecLanes) {
    const auto quarter = hn::LoadU(d32, quarters + f);
    const Vec sine = LoadFloats(sines + f);
    const Vec cosine = LoadFloats(cosines + f);
    // RotateByQuarter: odd quarters exchange the two; the cosine is negative
    // in 1 and 2, where the two bits differ, the sine in 2 and 3.
    const auto odd = hn::And(quarter, hn::Set(d32, 1u));
    const auto half = hn::ShiftRight<1>(quarter);
    const auto is_odd = hn::RebindMask(kFloats, hn::Ne(odd, hn::Zero(d32)));
    const auto cosine_sign = hn::ShiftLeft<31>(hn::Xor(odd, half));
    const auto sine_sign = hn::ShiftLeft<31>(half);
    const Vec turned_cosine = hn::Xor(hn::IfThenElse(is_odd, sine, cosine),
                                      hn::BitCast(kFloats, cosine_sign));
    const Vec turned_sine = hn::Xor(hn::IfThenElse(is_odd, cosine, sine),
                                    hn::BitCast(kFloats, sine_sign));
    hn::StoreU(hn::Mul(turned_cosine, factor), kFloats, cosines + f);
    hn::StoreU(hn::Mul(turned_sine, factor), kFloats, sines + f);
  }
  for (; f < pairs; ++f) {
    float sine, cosine;
    RotateByQuarter(quarters[f], sines[f], cosines[f], &sine, &cosine);
    cosines[f] = cosine * params.attention_factor;
    sines[f] = sine * params.attention_factor;
  }
}

HWY_INLINE void TurnHalves(Vec c, Vec s, float* first, float* second) {
  const Vec a = LoadFloats(first);
  const Vec b = LoadFloats(second);
  hn::StoreU(Fma(a, c, hn::Neg(hn::Mul(b, s))), kFloats, first);
  hn::StoreU(Fma(b, c, hn::Mul(a, s)), kFloats, second);
}

HWY_INLINE void TurnNeighbours(Vec c, Vec s, float* pairs) {
#if HWY_TARGET != HWY_SCALAR
  Vec a, b;
  hn::LoadInterleaved2(kFloats, pairs, a, b);
  hn::StoreInterleaved2(Fma(a, c, hn::Neg(hn::Mul(b, s))),
                        Fma(b, c, hn::Mul(a, s)), kFloats, pairs);
#else
  TurnHalves(c, s, pairs, pairs + 1);
#endif
}

void RotateHalves(float* head, int64_t pairs, const float* cosines,
                  const float* sines) {
  int64_t f = 0;
  for (; f + kVecLanes <= pairs; f += kVecLanes) {
    TurnHalves(LoadFloats(cosines + f), LoadFloats(sines + f), head + f,
               head + pairs + f);
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
  for (; f + kVecLanes <= pairs; f += kVecLanes) {
    TurnNeighbours(LoadFloats(cosines + f), LoadFloats(sines + f),
                   head + 2 * f);
  }
  for (; f < pairs; ++f) {
    const float a = head[2 * f];
    const float b = head[2 * f + 1];
    head[2 * f] = std::fma(a, cosines[f], -(b * sines[f]));
    head[2 * f + 1] = std::fma(b, cosines[f], a * sines[f]);
  }
}

// Heads with the same list of pairs: what a vector of pairs turns by is looked
// up once for all of them.
void RotateAlike(RopePairing pairing, const RopeHead* heads, int64_t num_heads,
                 const Turns& turns, float* row) {
  const int64_t pairs = heads[0].num_pairs;
  const int32_t* list = heads[0].pairs;
  const hn::RebindToSigned<Floats> d32;
  int64_t i = 0;
  for (; i + kVecLanes <= pairs; i += kVecLanes) {
    Vec c = hn::Zero(kFloats);
    Vec s = c;
    if (list != nullptr) {
      const auto f = hn::LoadU(d32, list + i);
      c = hn::GatherIndex(kFloats, turns.cosines, f);
      s = hn::GatherIndex(kFloats, turns.sines, f);
    } else {
      c = LoadFloats(turns.cosines + i);
      s = LoadFloats(turns.sines + i);
    }
    for (int64_t h = 0; h < num_heads; ++h) {
      float* head = row + heads[h].begin;
      if (pairing == RopePairing::kHalfSplit) {
        TurnHalves(c, s, head + i, head + pairs + i);
      } else {
        TurnNeighbours(c, s, head + 2 * i);
      }
    }
  }
  const bool half_split = pairing == RopePairing::kHalfSplit;
  for (; i < pairs; ++i) {
    const int64_t f = list != nullptr ? list[i] : i;
    const float c = turns.cosines[f];
    const float s = turns.sines[f];
    for (int64_t h = 0; h < num_heads; ++h) {
      float* first = row + heads[h].begin + (half_split ? i : 2 * i);
      float* second = first + (half_split ? pairs : 1);
      const float a = *first;
      const float b = *second;
      *first = std::fma(a, c, -(b * s));
      *second = std::fma(b, c, a * s);
    }
  }
}

void RotateChosen(const RopeTensor& tensor, RopePairing pairing,
                  const Turns& turns, float* row) {
  for (int64_t h = 0; h < tensor.num_heads;) {
    const RopeHead& head = tensor.heads[h];
    int64_t end = h + 1;
    while (end < tensor.num_heads && tensor.heads[end].pairs == head.pairs &&
           tensor.heads[end].num_pairs == head.num_pairs) {
      ++end;
    }
    RotateAlike(pairing, &head, end - h, turns, row);
    h = end;
  }
}

void RotateRow(const RopeTensor& tensor, const RopeParams& params, int64_t t,
               const Turns& turns) {
  if (tensor.data == nullptr) return;
  float* row = tensor.data + t * tensor.row_stride;
  if (tensor.heads != nullptr) {
    return RotateChosen(tensor, params.pairing, turns, row);
  }
  const int64_t pairs = params.rotary_dim / 2;
  for (int64_t h = 0; h < tensor.num_heads; ++h) {
    float* head = row + h * tensor.head_dim;
    if (params.pairing == RopePairing::kHalfSplit) {
      RotateHalves(head, pairs, turns.cosines, turns.sines);
    } else {
      RotateNeighbours(head, pairs, turns.cosines, turns.sines);
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
    RotateRow(params.q, params, t, {cosines, sines});
    RotateRow(params.k, params, t, {cosines, sines});
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

int64_t NumbersPerRow(const RopeTensor& tensor) {
  if (tensor.heads == nullptr) return tensor.num_heads * tensor.head_dim;
  int64_t numbers = 0;
  for (int64_t h = 0; h < tensor.num_heads; ++h) {
    numbers += 2 * tensor.heads[h].num_pairs;
  }
  return numbers;
}

}  // namespace

void RopeSimd(const RopeParams& params, float* scratch, CpuStream& stream) {
  const int64_t numbers = NumbersPerRow(params.q) + NumbersPerRow(params.k);
  ForRows(stream, params.num_tokens, numbers,
          [&](int64_t begin, int64_t end, int thread) {
            HWY_DYNAMIC_DISPATCH(RotateRows)
            (params, begin, end, scratch + thread * RopeScratch(params));
          });
}

}  // namespace kvasir::kernels
#endif  // HWY_ONCE
