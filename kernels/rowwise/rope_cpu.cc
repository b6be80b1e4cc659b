#include <type_traits>

#include "kernels/device/parallel.h"
#include "kernels/device/stream.h"
#include "kernels/rowwise/rope.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/rowwise/rope_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/simd/simd-inl.h"

#ifndef KVASIR_KERNELS_ROPE_ONCE_
#define KVASIR_KERNELS_ROPE_ONCE_
namespace kvasir::kernels {

// The cosines and sines of one position, [rotary_dim / 2] each.
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

// Computes the cosines and sines of one position. At first, `cosines` holds
// what remains of each angle after its quarter turns are split off.
void Angles(const RopeArgs& params, int64_t position, uint32_t* quarters,
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
    // As in RotateByQuarter: an odd quarter exchanges cosine and sine. The
    // cosine is negative in quarters 1 and 2, whose two bits differ, and the
    // sine in quarters 2 and 3.
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

// Shorter vectors, for the pairs that do not fill a whole vector: a pruned head
// may have any number of pairs.
using EightLanes = hn::CappedTag < float, kVecLanes<8 ? kVecLanes : 8>;
using FourLanes = hn::CappedTag < float, kVecLanes<4 ? kVecLanes : 4>;

template <class D, class V>
HWY_INLINE V FmaOf(D /*d*/, V a, V b, V c) {
  if constexpr (std::is_same_v<D, Floats>) {
    return Fma(a, b, c);
  } else {
    return hn::MulAdd(a, b, c);
  }
}

template <class D, class V>
HWY_INLINE void TurnHalves(D d, V c, V s, float* first, float* second) {
  const V a = hn::LoadU(d, first);
  const V b = hn::LoadU(d, second);
  hn::StoreU(FmaOf(d, a, c, hn::Neg(hn::Mul(b, s))), d, first);
  hn::StoreU(FmaOf(d, b, c, hn::Mul(a, s)), d, second);
}

template <class D, class V>
HWY_INLINE void TurnNeighbours(D d, V c, V s, float* pairs) {
#if HWY_TARGET != HWY_SCALAR
  V a, b;
  hn::LoadInterleaved2(d, pairs, a, b);
  hn::StoreInterleaved2(FmaOf(d, a, c, hn::Neg(hn::Mul(b, s))),
                        FmaOf(d, b, c, hn::Mul(a, s)), d, pairs);
#else
  TurnHalves(d, c, s, pairs, pairs + 1);
#endif
}

// Rotates whole vectors of pairs, from pair i on. Returns the first pair that
// is left.
template <bool kHalves, class D>
HWY_INLINE int64_t TurnVectors(D d, const RopeHead* heads, int64_t num_heads,
                               const Turns& turns, int64_t i, float* row) {
  constexpr auto kStep = static_cast<int64_t>(hn::MaxLanes(D()));
  const hn::RebindToSigned<D> d32;
  const int64_t pairs = heads[0].num_pairs;
  const int32_t* list = heads[0].pairs;
  for (; i + kStep <= pairs; i += kStep) {
    auto c = hn::Zero(d);
    auto s = c;
    if (list != nullptr) {
      const auto f = hn::LoadU(d32, list + i);
      c = hn::GatherIndex(d, turns.cosines, f);
      s = hn::GatherIndex(d, turns.sines, f);
    } else {
      c = hn::LoadU(d, turns.cosines + i);
      s = hn::LoadU(d, turns.sines + i);
    }
    for (int64_t h = 0; h < num_heads; ++h) {
      float* head = row + heads[h].begin;
      if constexpr (kHalves) {
        TurnHalves(d, c, s, head + i, head + pairs + i);
      } else {
        TurnNeighbours(d, c, s, head + 2 * i);
      }
    }
  }
  return i;
}

// Rotates heads that have the same list of pairs. The cosines and sines of a
// vector of pairs are looked up once for all these heads.
template <bool kHalves>
void RotateAlike(const RopeHead* heads, int64_t num_heads, const Turns& turns,
                 float* row) {
  const int64_t pairs = heads[0].num_pairs;
  const int32_t* list = heads[0].pairs;
  int64_t i = TurnVectors<kHalves>(kFloats, heads, num_heads, turns, 0, row);
  if constexpr (kVecLanes > 8) {
    i = TurnVectors<kHalves>(EightLanes(), heads, num_heads, turns, i, row);
  }
  if constexpr (kVecLanes > 4) {
    i = TurnVectors<kHalves>(FourLanes(), heads, num_heads, turns, i, row);
  }
  for (; i < pairs; ++i) {
    const int64_t f = list != nullptr ? list[i] : i;
    const float c = turns.cosines[f];
    const float s = turns.sines[f];
    for (int64_t h = 0; h < num_heads; ++h) {
      float* first = row + heads[h].begin + (kHalves ? i : 2 * i);
      float* second = first + (kHalves ? pairs : 1);
      const float a = *first;
      const float b = *second;
      *first = std::fma(a, c, -(b * s));
      *second = std::fma(b, c, a * s);
    }
  }
}

void RotateHeads(RopePairing pairing, const RopeHead* heads, int64_t num_heads,
                 const Turns& turns, float* row) {
  if (pairing == RopePairing::kHalfSplit) {
    RotateAlike<true>(heads, num_heads, turns, row);
  } else {
    RotateAlike<false>(heads, num_heads, turns, row);
  }
}

void RotateChosen(const RopeTensorArgs& tensor, RopePairing pairing,
                  const Turns& turns, float* row) {
  for (int64_t h = 0; h < tensor.num_heads;) {
    const RopeHead& head = tensor.heads[h];
    int64_t end = h + 1;
    while (end < tensor.num_heads && tensor.heads[end].pairs == head.pairs &&
           tensor.heads[end].num_pairs == head.num_pairs) {
      ++end;
    }
    RotateHeads(pairing, &head, end - h, turns, row);
    h = end;
  }
}

void RotateRow(const RopeTensorArgs& tensor, const RopeArgs& params, int64_t t,
               const Turns& turns) {
  if (tensor.data == nullptr) return;
  float* row = tensor.data + t * tensor.row_stride;
  if (tensor.heads != nullptr) {
    return RotateChosen(tensor, params.pairing, turns, row);
  }
  for (int64_t h = 0; h < tensor.num_heads; ++h) {
    const RopeHead head = {h * tensor.head_dim, params.rotary_dim / 2, nullptr};
    RotateHeads(params.pairing, &head, 1, turns, row);
  }
}

void RotateRows(const RopeArgs& params, int64_t begin, int64_t end,
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

int64_t NumbersPerRow(const RopeTensorArgs& tensor) {
  if (tensor.heads == nullptr) return tensor.num_heads * tensor.head_dim;
  int64_t numbers = 0;
  for (int64_t h = 0; h < tensor.num_heads; ++h) {
    numbers += 2 * tensor.heads[h].num_pairs;
  }
  return numbers;
}

}  // namespace

void RopeSimd(const RopeArgs& params, float* scratch, CpuStream& stream) {
  const int64_t numbers = NumbersPerRow(params.q) + NumbersPerRow(params.k);
  ForRows(stream, params.num_tokens, numbers,
          [&](int64_t begin, int64_t end, int thread) {
            HWY_DYNAMIC_DISPATCH(RotateRows)
            (params, begin, end,
             scratch + thread * RopeScratch(params.rotary_dim));
          });
}

}  // namespace kvasir::kernels
#endif  // HWY_ONCE
