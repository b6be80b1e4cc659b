// Vector versions of the functions in scalar_math.h. Each gives the same bits
// as its scalar version. For inclusion by *_cpu.cc after hwy/foreach_target.h.
#if defined(KVASIR_KERNELS_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVASIR_KERNELS_SIMD_INL_H_
#undef KVASIR_KERNELS_SIMD_INL_H_
#else
#define KVASIR_KERNELS_SIMD_INL_H_
#endif

#include <cmath>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/device/dtype.h"
#include "kernels/simd/scalar_math.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Vectors of at most kLanes (16) lanes, even if the instruction set has more.
using Floats = hn::CappedTag<float, kLanes>;
using Vec = hn::Vec<Floats>;
inline constexpr Floats kFloats;
inline constexpr int kVecLanes = static_cast<int>(hn::MaxLanes(Floats()));
inline constexpr int kVecsPerWide = kLanes / kVecLanes;
// Vectors of 32-bit words with the same number of lanes.
using Words = hn::RebindToUnsigned<Floats>;
using WordVec = hn::Vec<Words>;
inline constexpr Words kWords;

HWY_INLINE Vec Broadcast(float value) { return hn::Set(kFloats, value); }

// Returns a * b + c with one rounding. The targets without a fused
// instruction (EMU128 and SCALAR) compute it lane by lane, because their
// MulAdd rounds twice.
HWY_INLINE Vec Fma(Vec a, Vec b, Vec c) {
#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR
  HWY_ALIGN float x[kVecLanes], y[kVecLanes], z[kVecLanes];
  hn::Store(a, kFloats, x);
  hn::Store(b, kFloats, y);
  hn::Store(c, kFloats, z);
  for (int i = 0; i < kVecLanes; ++i) z[i] = std::fma(x[i], y[i], z[i]);
  return hn::Load(kFloats, z);
#else
  return hn::MulAdd(a, b, c);
#endif
}

HWY_INLINE Vec LoadFloats(const float* from) {
  return hn::LoadU(kFloats, from);
}
HWY_INLINE Vec LoadFloats(const Bf16* from) {
  const hn::Rebind<uint16_t, Floats> d16;
  const hn::RebindToUnsigned<Floats> d32;
  const auto bits = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(from));
  return hn::BitCast(kFloats, hn::ShiftLeft<16>(hn::PromoteTo(d32, bits)));
}
HWY_INLINE Vec LoadFloats(const F16* from) {
#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR
  HWY_ALIGN float lanes[kVecLanes];
  for (int i = 0; i < kVecLanes; ++i) lanes[i] = ToFloat(from[i]);
  return hn::Load(kFloats, lanes);
#else
  const hn::Rebind<hwy::float16_t, Floats> d16;
  return hn::PromoteTo(
      kFloats, hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(from)));
#endif
}

// Returns the maximum as scalar code computes it: a > b ? a : b. So if either
// operand is NaN, the result is b.
template <typename V>
HWY_INLINE V Larger(V a, V b) {
#if HWY_ARCH_X86 && HWY_TARGET != HWY_EMU128 && HWY_TARGET != HWY_SCALAR
  return hn::Max(a, b);  // the x86 instruction is defined as a > b ? a : b
#else
  return hn::IfThenElse(hn::Gt(a, b), a, b);
#endif
}

// Like ExpVec, for x that is at most kHighest or NaN. NaN stays NaN.
HWY_INLINE Vec ExpOfCapped(Vec x) {
  namespace c = exp_constants;
  const hn::RebindToUnsigned<Floats> d32;
  const Vec n = hn::Round(hn::Mul(x, Broadcast(c::kLog2E)));
  Vec r = Fma(n, Broadcast(-c::kLn2High), x);
  r = Fma(n, Broadcast(-c::kLn2Low), r);
  Vec p = Broadcast(c::kC6);
  p = Fma(p, r, Broadcast(c::kC5));
  p = Fma(p, r, Broadcast(c::kC4));
  p = Fma(p, r, Broadcast(c::kC3));
  p = Fma(p, r, Broadcast(c::kC2));
  p = Fma(p, hn::Mul(r, r), r);
  p = hn::Add(p, Broadcast(1.0f));
  // Adding 1.5 * 2^23 + 127 puts the biased exponent n + 127 into the lowest
  // bits of the float. For x below kLowest this is meaningless, but then the
  // result is replaced by 0.
  const Vec exponent = hn::Add(n, Broadcast(0x1.8p23f + 127.0f));
  const Vec scale =
      hn::BitCast(kFloats, hn::ShiftLeft<23>(hn::BitCast(d32, exponent)));
  return hn::IfThenZeroElse(hn::Lt(x, Broadcast(c::kLowest)),
                            hn::Mul(p, scale));
}

HWY_INLINE Vec ExpVec(Vec x) {
  const Vec highest = Broadcast(exp_constants::kHighest);
  const Vec capped = hn::IfThenElse(hn::Gt(x, highest), highest, x);
  return hn::IfThenElse(hn::IsNaN(x), x, ExpOfCapped(capped));
}

HWY_INLINE Vec SiluVec(Vec x) {
  const Vec quotient = hn::Div(x, hn::Add(Broadcast(1.0f), ExpVec(hn::Neg(x))));
  return hn::IfThenZeroElse(hn::Lt(x, Broadcast(-exp_constants::kHighest)),
                            quotient);
}

HWY_INLINE Vec NormalTailVec(Vec a) {
  namespace c = normal_constants;
  a = hn::IfThenElse(hn::Gt(a, Broadcast(c::kFarthest)),
                     Broadcast(c::kFarthest), a);
  const Vec one = Broadcast(1.0f);
  const Vec t = hn::Div(one, Fma(Broadcast(c::kSlope), a, one));
  Vec p = Broadcast(c::kC9);
  p = Fma(p, t, Broadcast(c::kC8));
  p = Fma(p, t, Broadcast(c::kC7));
  p = Fma(p, t, Broadcast(c::kC6));
  p = Fma(p, t, Broadcast(c::kC5));
  p = Fma(p, t, Broadcast(c::kC4));
  p = Fma(p, t, Broadcast(c::kC3));
  p = Fma(p, t, Broadcast(c::kC2));
  p = Fma(p, t, Broadcast(c::kC1));
  p = Fma(p, t, Broadcast(c::kC0));
  const Vec half = Broadcast(-0.5f);
  const Vec square = hn::Mul(a, a);
  const Vec rest = Fma(a, a, hn::Neg(square));
  Vec power = ExpVec(hn::Mul(half, square));
  power = Fma(power, hn::Mul(half, rest), power);
  return hn::Mul(power, hn::Mul(p, t));
}

HWY_INLINE Vec GeluVec(Vec x) {
  const Vec tail = NormalTailVec(hn::Abs(x));
  const Vec share = hn::IfThenElse(hn::Lt(x, hn::Zero(kFloats)), tail,
                                   hn::Sub(Broadcast(1.0f), tail));
  return hn::IfThenZeroElse(hn::Lt(x, Broadcast(-normal_constants::kFarthest)),
                            hn::Mul(x, share));
}

HWY_INLINE Vec GeluTanhVec(Vec x) {
  namespace c = gelu_constants;
  const Vec twice = hn::Mul(
      x, Fma(hn::Mul(x, x), Broadcast(c::kCubic), Broadcast(c::kLinear)));
  const Vec quotient =
      hn::Div(x, hn::Add(Broadcast(1.0f), ExpVec(hn::Neg(twice))));
  return hn::IfThenZeroElse(hn::Lt(twice, Broadcast(-exp_constants::kHighest)),
                            quotient);
}

HWY_INLINE Vec SoftCapVec(Vec x, float cap) {
  const Vec power = ExpVec(hn::Mul(x, Broadcast(2.0f / cap)));
  return hn::Sub(Broadcast(cap), hn::Div(Broadcast(2.0f * cap),
                                         hn::Add(Broadcast(1.0f), power)));
}

HWY_INLINE Vec ReluVec(Vec x) {
  const Vec zero = hn::Zero(kFloats);
  return hn::IfThenElse(hn::Lt(x, zero), zero, x);
}

// The kLanes (16) partial results of a reduction, in as many vectors as
// they need.
struct Wide {
  Vec part[kVecsPerWide];
};

template <typename Function>
HWY_INLINE Wide MakeWide(Function&& function) {
  Wide wide;
  for (int i = 0; i < kVecsPerWide; ++i) wide.part[i] = function(i);
  return wide;
}

HWY_INLINE void StoreWide(const Wide& wide, float* lanes) {
  for (int i = 0; i < kVecsPerWide; ++i) {
    hn::StoreU(wide.part[i], kFloats, lanes + i * kVecLanes);
  }
}

#if HWY_TARGET != HWY_SCALAR
// Repeatedly combines the two halves of a vector until four lanes are left.
template <class D, class V, typename Combine>
HWY_INLINE auto FoldToFour(D d, V v, const Combine& combine) {
  if constexpr (hn::MaxLanes(D()) > 4) {
    const hn::Half<D> half;
    return FoldToFour(
        half, combine(hn::LowerHalf(half, v), hn::UpperHalf(half, v)), combine);
  } else {
    (void)d;
    return v;
  }
}
// Does the first steps of TreeSum or TreeMax, until four lanes are left.
template <typename Combine>
HWY_INLINE auto ReduceToFour(const Wide& wide, const Combine& combine) {
  Vec parts[kVecsPerWide];
  for (int i = 0; i < kVecsPerWide; ++i) parts[i] = wide.part[i];
  for (int width = kVecsPerWide / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) {
      parts[i] = combine(parts[i], parts[i + width]);
    }
  }
  return FoldToFour(kFloats, parts[0], combine);
}
#endif

// Computes TreeSum or TreeMax in registers: repeatedly combines the two halves
// of the lanes until one lane is left. combine(low, high) combines two halves.
template <typename Combine>
HWY_INLINE float ReduceWide(const Wide& wide, const Combine& combine) {
#if HWY_TARGET == HWY_SCALAR
  float lanes[kLanes];
  StoreWide(wide, lanes);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) {
      lanes[i] = hn::GetLane(combine(hn::Set(kFloats, lanes[i]),
                                     hn::Set(kFloats, lanes[i + width])));
    }
  }
  return lanes[0];
#else
  auto four = ReduceToFour(wide, combine);
  four = combine(four, hn::Shuffle1032(four));
  return hn::GetLane(combine(four, hn::Shuffle2301(four)));
#endif
}

struct AddStep {
  template <typename V>
  HWY_INLINE V operator()(V low, V high) const {
    return hn::Add(low, high);
  }
};
struct LargerStep {
  template <typename V>
  HWY_INLINE V operator()(V low, V high) const {
    return Larger(low, high);
  }
};

// Sets out[i] = ReduceWide(wides[i]). If kCount is 4, the last steps are
// computed for all four results at once.
template <int kCount, typename Combine>
HWY_INLINE void ReduceWides(const Wide (&wides)[kCount], const Combine& combine,
                            float (&out)[kCount]) {
#if HWY_TARGET != HWY_SCALAR
  if constexpr (kCount == 4) {
    const hn::CappedTag<float, 4> d4;
    using Four = hn::Vec<decltype(d4)>;
    Four fours[4];
    for (int i = 0; i < 4; ++i) fours[i] = ReduceToFour(wides[i], combine);
    const auto pair = [&](Four a, Four b) {
      return combine(hn::ConcatLowerLower(d4, b, a),
                     hn::ConcatUpperUpper(d4, b, a));
    };
    const Four first = pair(fours[0], fours[1]);
    const Four second = pair(fours[2], fours[3]);
    hn::StoreU(combine(hn::ConcatEven(d4, second, first),
                       hn::ConcatOdd(d4, second, first)),
               d4, out);
    return;
  }
#endif
  for (int i = 0; i < kCount; ++i) out[i] = ReduceWide(wides[i], combine);
}

HWY_INLINE float SumOf(const Wide& wide) { return ReduceWide(wide, AddStep()); }

}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#endif  // KVASIR_KERNELS_SIMD_INL_H_
