// Arithmetic for kernels: conversions, square roots, exponentials, pairs of
// 16-bit floats, and selection of bytes. On the host each function has a
// defined result. If a GPU's result may differ from it, the function's comment
// says by how much. C++17.
#pragma once

#include <cmath>

#include "kernels/device/dtype.h"
#include "kernels/simt/target.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET::simt {

// Exact conversions to float32. A NaN stays a NaN; a GPU converts every NaN of
// fp16 to 0x7fffffff.
KVASIR_DEVICE float ToFloat(float value) { return value; }
KVASIR_DEVICE float ToFloat(Bf16 value) {
  return BitsAs<float>(static_cast<uint32_t>(value.bits) << 16);
}
KVASIR_DEVICE float ToFloat(F16 value) {
#ifdef __CUDACC__
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return wide;
#else
  return kernels::ToFloat(value);
#endif
}

// Rounds to nearest, ties to even. A NaN stays a NaN: on a GPU its bits become
// 0x7fff, on the host it keeps its sign and upper bits. Therefore tests that
// compare both accept any NaN.
template <typename T>
KVASIR_DEVICE T FromFloat(float value) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return value;
  } else {
#ifdef __CUDACC__
    T narrow;
    if constexpr (DTypeOf<T>::kValue == DType::kBf16) {
      asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
    } else {
      asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
    }
    return narrow;
#else
    return kernels::FromFloat<T>(value);
#endif
  }
}

// Returns a * b + c, rounded once.
KVASIR_DEVICE float Fma(float a, float b, float c) {
#ifdef __CUDACC__
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

// Returns the square root, correctly rounded.
KVASIR_DEVICE float Sqrt(float x) {
#ifdef __CUDACC__
  return __fsqrt_rn(x);
#else
  return std::sqrt(x);
#endif
}

// Returns the larger number, where -0 is smaller than 0. If one operand is a
// NaN, the result is the other operand. Exchanging the operands does not change
// the bits of the result, not even for two NaNs.
KVASIR_DEVICE float Max(float a, float b) {
#ifdef __CUDACC__
  float most;
  asm("max.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
#else
  if (a != a && b != b) return BitsAs<float>(0x7fffffffu);
  if (a != a || b > a) return b;
  if (b != b || a > b) return a;
  return std::signbit(a) ? b : a;
#endif
}

// 2^x. The host rounds to the nearest float; a GPU (ex2.approx.ftz) is within 2
// ulp. Both return 0 for results below 2^-126.
KVASIR_DEVICE float Exp2(float x) {
#ifdef __CUDACC__
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
#else
  return x < -126.0f ? 0.0f
                     : static_cast<float>(std::exp2(static_cast<double>(x)));
#endif
}
inline constexpr float kLog2E = 1.44269504f;

// Arithmetic on pairs of 16-bit floats in a word; the first number is in the
// lower half. FmaPair is a b + c, rounded once. For bf16, sm_80 has only this
// instruction, so AddPair computes a * 1 + c, which is rounded in the same way.
KVASIR_DEVICE uint32_t FmaPair(Bf16, uint32_t a, uint32_t b, uint32_t c) {
#ifdef __CUDACC__
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
#else
  return emulation::FmaPair(DType::kBf16, a, b, c);
#endif
}
KVASIR_DEVICE uint32_t FmaPair(F16, uint32_t a, uint32_t b, uint32_t c) {
#ifdef __CUDACC__
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
#else
  return emulation::FmaPair(DType::kF16, a, b, c);
#endif
}
template <typename T>
KVASIR_DEVICE constexpr uint32_t PairOfOnes() {
  return DTypeOf<T>::kValue == DType::kBf16 ? 0x3f803f80u : 0x3c003c00u;
}
template <typename T>
KVASIR_DEVICE uint32_t AddPair(uint32_t a, uint32_t b) {
  return FmaPair(T{}, a, PairOfOnes<T>(), b);
}
template <typename T>
KVASIR_DEVICE uint32_t SubPair(uint32_t a, uint32_t b) {
  return FmaPair(T{}, b, PairOfOnes<T>() ^ 0x80008000u, a);
}
// Multiplies pairs, by FmaPair with -0 as the third operand, so that a product
// that is -0 stays -0.
template <typename T>
KVASIR_DEVICE uint32_t MulPair(uint32_t a, uint32_t b) {
  return FmaPair(T{}, a, b, 0x80008000u);
}
// For each half, the smaller of two float16 numbers. If one of them is a NaN,
// the result is the other.
KVASIR_DEVICE uint32_t MinPair(uint32_t a, uint32_t b) {
#ifdef __CUDACC__
  uint32_t least;
  asm("min.f16x2 %0, %1, %2;" : "=r"(least) : "r"(a), "r"(b));
  return least;
#else
  uint32_t least = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const auto of_a = F16{static_cast<uint16_t>(a >> shift)};
    const auto of_b = F16{static_cast<uint16_t>(b >> shift)};
    // If both are zeros, the minimum is -0 if one of them is -0.
    const float min = -Max(-kernels::ToFloat(of_a), -kernels::ToFloat(of_b));
    least |= static_cast<uint32_t>(FromFloat<F16>(min).bits) << shift;
  }
  return least;
#endif
}
// Rounds two numbers to nearest and returns them as a pair.
template <typename T>
KVASIR_DEVICE uint32_t MakePair(float first, float second) {
#ifdef __CUDACC__
  uint32_t pair;  // the instruction puts its first operand into the upper half
  if constexpr (DTypeOf<T>::kValue == DType::kBf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  }
  return pair;
#else
  return FromFloat<T>(first).bits |
         static_cast<uint32_t>(FromFloat<T>(second).bits) << 16;
#endif
}

// Returns word & mask | other, by one instruction. If mask and other are
// constants, nvcc would generate two.
KVASIR_DEVICE uint32_t AndOr(uint32_t word, uint32_t mask, uint32_t other) {
#ifdef __CUDACC__
  uint32_t bits;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;"
      : "=r"(bits)
      : "r"(word), "r"(mask), "r"(other));
  return bits;
#else
  return (word & mask) | other;
#endif
}

// Returns four of eight bytes: bytes 0 to 3 are those of a, bytes 4 to 7 those
// of b. The lower three bits of nibble i of `selector` are the index of byte i
// of the result. If bit 3 of the nibble is set, the sign bit of the chosen byte
// fills byte i instead.
KVASIR_DEVICE uint32_t PickBytes(uint32_t a, uint32_t b, uint32_t selector) {
#ifdef __CUDACC__
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(selector));
  return bytes;
#else
  return emulation::PickBytes(a, b, selector);
#endif
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET::simt
