// The arithmetic that all CPU back ends share, in scalar form: elementary
// functions as fixed sequences of IEEE operations, and sums over a fixed number
// of lanes. SIMD code does the same operations in the same order, so results do
// not depend on the instruction set. C++17.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/host_device.h"
#include "kernels/device/dtype.h"

namespace kvasir::kernels {

// Every reduction keeps this number of partial results (lanes): element i is
// added to lane i % 16, and TreeSum or TreeMax combines the lanes. AVX-512
// vectors, the widest that are supported, have 16 lanes.
inline constexpr int kLanes = 16;

// Returns the sum of the 16 lanes, which are overwritten.
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

// Exp(x) is exp(x) with an error of at most 2 ulp. With x = n ln2 + r, it is
// 2^n times a degree-6 polynomial in r. Below kLowest the result is 0 (no
// subnormals), and above kHighest it is exp(kHighest). NaN stays NaN.
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

// Silu(x) is x / (1 + exp(-x)), or 0 if exp(-x) would overflow.
inline float Silu(float x) {
  return x < -exp_constants::kHighest ? 0.0f : x / (1.0f + Exp(-x));
}

// NormalTail(a) is 1 minus the normal distribution function at a >= 0, with a
// relative error of at most 4e-7. It is computed as exp(-a^2/2) * t * p(t) with
// t = 1/(1 + 0.3 a) and a degree-9 polynomial p. Above kFarthest it is 0 (no
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

// Gelu(x) is x times the normal distribution function at x. If that function is
// 0 in float32, the result is 0, even for x = -infinity.
inline float Gelu(float x) {
  if (x < -normal_constants::kFarthest) return 0.0f;
  const float tail = NormalTail(std::fabs(x));
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

// GeluTanh(x) is x (1 + tanh(u)) / 2 with u = sqrt(2/pi) (x + 0.044715 x^3),
// computed as x / (1 + exp(-2u)); 0 if exp(-2u) would overflow.
namespace gelu_constants {
inline constexpr float kLinear = 1.59576912f;  // 2 sqrt(2/pi)
inline constexpr float kCubic = 0.0713548163f;
}  // namespace gelu_constants

inline float GeluTanh(float x) {
  namespace c = gelu_constants;
  const float twice = x * std::fma(x * x, c::kCubic, c::kLinear);
  return twice < -exp_constants::kHighest ? 0.0f : x / (1.0f + Exp(-twice));
}

// SoftCap(x, cap) is cap * tanh(x / cap), computed as
// cap - 2 cap / (1 + exp(2 x / cap)); cap > 0.
inline float SoftCap(float x, float cap) {
  return cap - 2.0f * cap / (1.0f + Exp(x * (2.0f / cap)));
}

inline float Relu(float x) { return x < 0.0f ? 0.0f : x; }

// SinCosReduced computes sine and cosine of r in [-pi/4, pi/4]. The error of
// each is at most 1 ulp of the larger of the two.
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

// An angle, as the nearest multiple of a quarter turn plus a remainder in
// [-pi/4, pi/4] (radians). ReduceTurns computes it from an angle in units of
// 2^-64 turns.
struct ReducedAngle {
  uint32_t quarter;  // 0..3
  float remainder;
};

KVASIR_HOST_DEVICE inline ReducedAngle ReduceTurns(uint64_t turns) {
  constexpr uint64_t kEighth = uint64_t{1} << 61;
  const uint64_t quarter = (turns + kEighth) >> 62;
  const int64_t rest = static_cast<int64_t>(turns - (quarter << 62));
  // Rounds the remainder to its upper 32 bits. Their unit, 1.5e-9 rad, is far
  // below the distance of float32 numbers near 1 (6e-8).
  const int32_t top = static_cast<int32_t>((rest + (int64_t{1} << 31)) >> 32);
  return {static_cast<uint32_t>(quarter),
          static_cast<float>(top) * trig_constants::kRadiansPerUnit};
}

// Computes the cosine and sine of an angle from those of its remainder
// (ReducedAngle).
KVASIR_HOST_DEVICE inline void RotateByQuarter(uint32_t quarter, float sin_r,
                                               float cos_r, float* sin_out,
                                               float* cos_out) {
  const float a = (quarter & 1u) ? sin_r : cos_r;
  const float b = (quarter & 1u) ? cos_r : sin_r;
  *cos_out = (quarter == 1u || quarter == 2u) ? -a : a;
  *sin_out = (quarter >= 2u) ? -b : b;
}

// The cosine and sine of an angle in units of 2^-64 turns.
struct UnitVector {
  float cosine;
  float sine;
};
KVASIR_HOST_DEVICE inline UnitVector UnitVectorAt(uint64_t turns) {
  const ReducedAngle angle = ReduceTurns(turns);
  UnitVector vector;
  SinCosReduced(angle.remainder, &vector.sine, &vector.cosine);
  RotateByQuarter(angle.quarter, vector.sine, vector.cosine, &vector.sine,
                  &vector.cosine);
  return vector;
}

}  // namespace kvasir::kernels
