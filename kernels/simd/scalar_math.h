// The arithmetic of every back end, written for one lane: elementary functions
// as fixed chains of IEEE operations, and sums over one fixed virtual width.
// SIMD code does the same operations in the same order, so results do not
// depend on the instruction set. C++17.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/host_device.h"
#include "kernels/device/dtype.h"

namespace kvasir::kernels {

// Every reduction keeps this many partial results, element i in lane i % 16,
// and ends in TreeSum or TreeMax. 16 is the widest vector we have (AVX-512).
inline constexpr int kLanes = 16;

// Adds the 16 lanes. The sum is in lanes[0] afterwards; the other lanes are
// overwritten.
inline float TreeSum(float* lanes) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] + lanes[i + width];
  }
  return lanes[0];
}

inline float TreeMax(float* lanes) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) {
      lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
    }
  }
  return lanes[0];
}

// exp(x) within 2 ulp: x = n ln2 + r, a degree-6 polynomial in r, times 2^n.
// Below kExpLowest the result is 0 (no subnormals), above kExpHighest it is
// that of kExpHighest; NaN stays NaN.
namespace exp_constants {
inline constexpr float kLowest = -87.33654f;
inline constexpr float kHighest = 88.3762f;
inline constexpr float kLog2E = 1.44269504f;
inline constexpr float kLn2High = 0.693359375f;
inline constexpr float kLn2Low = -2.12194440e-4f;
inline constexpr float kC6 = 1.3888887e-3f;
inline constexpr float kC5 = 8.3333310e-3f;
inline constexpr float kC4 = 4.1666668e-2f;
inline constexpr float kC3 = 1.6666667e-1f;
inline constexpr float kC2 = 0.5f;
}  // namespace exp_constants

KVASIR_HOST_DEVICE inline float Exp(float x) {
  namespace c = exp_constants;
  if (x != x) return x;
  if (x < c::kLowest) return 0.0f;
  if (x > c::kHighest) x = c::kHighest;
  const float n = std::nearbyint(x * c::kLog2E);
  float r = std::fma(n, -c::kLn2High, x);
  r = std::fma(n, -c::kLn2Low, r);
  float p = c::kC6;
  p = std::fma(p, r, c::kC5);
  p = std::fma(p, r, c::kC4);
  p = std::fma(p, r, c::kC3);
  p = std::fma(p, r, c::kC2);
  p = std::fma(p, r * r, r);
  p = p + 1.0f;
  const int32_t exponent = static_cast<int32_t>(n) + 127;
  return p * FloatOf(static_cast<uint32_t>(exponent) << 23);
}

// x / (1 + exp(-x)); 0 where that exponential would overflow.
inline float Silu(float x) {
  return x < -exp_constants::kHighest ? 0.0f : x / (1.0f + Exp(-x));
}

// 1 minus the normal distribution function at a >= 0, with a relative error of
// 4e-7: exp(-a^2/2) with a correction for the rounding of a^2, times a degree-9
// polynomial in t = 1/(1 + 0.3 a), times t. Beyond kFarthest it is 0 (no
// subnormals).
namespace normal_constants {
inline constexpr float kFarthest = 14.0f;
inline constexpr float kSlope = 0.3f;
inline constexpr float kC9 = -0.0206128359f;
inline constexpr float kC8 = 0.112375796f;
inline constexpr float kC7 = -0.228067517f;
inline constexpr float kC6 = 0.191581681f;
inline constexpr float kC5 = -0.0792473331f;
inline constexpr float kC4 = 0.0960578248f;
inline constexpr float kC3 = 0.0784255788f;
inline constexpr float kC2 = 0.110227324f;
inline constexpr float kC1 = 0.119572848f;
inline constexpr float kC0 = 0.119686641f;
}  // namespace normal_constants

inline float NormalTail(float a) {
  namespace c = normal_constants;
  if (a > c::kFarthest) a = c::kFarthest;
  const float t = 1.0f / std::fma(c::kSlope, a, 1.0f);
  float p = c::kC9;
  p = std::fma(p, t, c::kC8);
  p = std::fma(p, t, c::kC7);
  p = std::fma(p, t, c::kC6);
  p = std::fma(p, t, c::kC5);
  p = std::fma(p, t, c::kC4);
  p = std::fma(p, t, c::kC3);
  p = std::fma(p, t, c::kC2);
  p = std::fma(p, t, c::kC1);
  p = std::fma(p, t, c::kC0);
  const float square = a * a;
  const float rest = std::fma(a, a, -square);
  float power = Exp(-0.5f * square);
  power = std::fma(power, -0.5f * rest, power);
  return power * (p * t);
}

// x times the normal distribution function of x; 0 if that is 0.
inline float Gelu(float x) {
  if (x < -normal_constants::kFarthest) return 0.0f;
  const float tail = NormalTail(std::fabs(x));
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

// x (1 + tanh(u)) / 2 with u = sqrt(2/pi) (x + 0.044715 x^3), which equals x /
// (1 + exp(-2u)); 0 where that exponential would overflow.
namespace gelu_constants {
inline constexpr float kLinear = 1.59576912f;  // 2 sqrt(2/pi)
inline constexpr float kCubic = 0.0713548163f;
}  // namespace gelu_constants

inline float GeluTanh(float x) {
  namespace c = gelu_constants;
  const float twice = x * std::fma(x * x, c::kCubic, c::kLinear);
  return twice < -exp_constants::kHighest ? 0.0f : x / (1.0f + Exp(-twice));
}

inline float Relu(float x) { return x < 0.0f ? 0.0f : x; }

// sin and cos of r in [-pi/4, pi/4], within 1 ulp of the larger one.
namespace trig_constants {
inline constexpr float kRadiansPerUnit = 1.46291807926716e-9f;  // 2 pi / 2^32
inline constexpr float kS3 = -1.9515295891e-4f;
inline constexpr float kS2 = 8.3321608736e-3f;
inline constexpr float kS1 = -1.6666654611e-1f;
inline constexpr float kC3 = 2.443315711809948e-5f;
inline constexpr float kC2 = -1.388731625493765e-3f;
inline constexpr float kC1 = 4.166664568298827e-2f;
}  // namespace trig_constants

KVASIR_HOST_DEVICE inline void SinCosReduced(float r, float* sin_out,
                                             float* cos_out) {
  namespace c = trig_constants;
  const float z = r * r;
  float s = std::fma(c::kS3, z, c::kS2);
  s = std::fma(s, z, c::kS1);
  *sin_out = std::fma(s * z, r, r);
  float k = std::fma(c::kC3, z, c::kC2);
  k = std::fma(k, z, c::kC1);
  *cos_out = std::fma(k * z, z, std::fma(-0.5f, z, 1.0f));
}

// An angle in turns scaled by 2^64, reduced to the nearest quarter of a turn
// and a remainder in radians, in [-pi/4, pi/4].
struct ReducedAngle {
  uint32_t quarter;  // 0..3
  float remainder;
};

KVASIR_HOST_DEVICE inline ReducedAngle ReduceTurns(uint64_t turns) {
  constexpr uint64_t kEighth = uint64_t{1} << 61;
  const uint64_t quarter = (turns + kEighth) >> 62;
  const int64_t rest = static_cast<int64_t>(turns - (quarter << 62));
  // Takes the upper 32 bits of the remainder. Their steps are 1.5e-9 rad, far
  // below the precision of float32.
  const int32_t top = static_cast<int32_t>((rest + (int64_t{1} << 31)) >> 32);
  return {static_cast<uint32_t>(quarter),
          static_cast<float>(top) * trig_constants::kRadiansPerUnit};
}

// Computes cos and sin of the whole angle from those of the remainder.
KVASIR_HOST_DEVICE inline void RotateByQuarter(uint32_t quarter, float sin_r,
                                               float cos_r, float* sin_out,
                                               float* cos_out) {
  const float a = (quarter & 1u) ? sin_r : cos_r;
  const float b = (quarter & 1u) ? cos_r : sin_r;
  *cos_out = (quarter == 1u || quarter == 2u) ? -a : a;
  *sin_out = (quarter >= 2u) ? -b : b;
}

}  // namespace kvasir::kernels
