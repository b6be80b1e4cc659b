// Computes the range (scale and minimum) of a run of codes as a slot stores it,
// and the code of a number. kv_append.h has the contract. C++17.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/host_device.h"
#include "kernels/device/dtype.h"

namespace kvasir::kernels {

// The largest finite float. Device code cannot call std::numeric_limits.
inline constexpr float kGreatestFloat = 0x1.fffffep127f;

// Maps the bits of a finite 16-bit float to an integer. The integers are in the
// order of the floats: neighbouring floats map to neighbouring integers, and
// negative floats to negative integers.
KVASIR_HOST_DEVICE inline int32_t OrderOf(uint16_t bits) {
  const int32_t magnitude = bits & 0x7fff;
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}
KVASIR_HOST_DEVICE inline uint16_t BitsOfOrder(int32_t order) {
  return static_cast<uint16_t>(order < 0 ? 0x8000 | -order : order);
}

// Rounds x to the type T: up if kUp is set, otherwise down. The result is
// always finite and never -0.
template <typename T, bool kUp>
KVASIR_HOST_DEVICE T RoundToSide(float x) {
  constexpr int32_t kGreatest =
      DTypeOf<T>::kValue == DType::kF16 ? 0x7bff : 0x7f7f;
  const T nearest = FromFloat<T>(x);
  int32_t order = OrderOf(nearest.bits);
  if (kUp && ToFloat(nearest) < x) ++order;
  if (!kUp && ToFloat(nearest) > x) --order;
  order = order > kGreatest ? kGreatest : order;
  order = order < -kGreatest ? -kGreatest : order;
  return T{BitsOfOrder(order)};
}
template <>
KVASIR_HOST_DEVICE inline float RoundToSide<float, true>(float x) {
  return (x > kGreatestFloat ? kGreatestFloat : x) + 0.0f;
}
template <>
KVASIR_HOST_DEVICE inline float RoundToSide<float, false>(float x) {
  return x + 0.0f;
}

// The scale and minimum of a run, laid out as in a slot.
template <typename T>
struct StoredRange {
  T scale;
  T minimum;
};

// Returns the range for numbers from `low` to `high`, both of which are finite.
template <typename T>
KVASIR_HOST_DEVICE StoredRange<T> RangeOf(float low, float high, int bits) {
  StoredRange<T> range;
  range.minimum = RoundToSide<T, false>(low);
  const float levels = static_cast<float>((1 << bits) - 1);
  // The minimum is limited to finite values of T. If all numbers are below the
  // least finite T, the minimum is above `high`, and `width` is negative.
  const float width = high - ToFloat(range.minimum);
  range.scale = RoundToSide<T, true>((width > 0.0f ? width : 0.0f) / levels);
  return range;
}

// Returns the value that is coded in place of x: x itself, or 0 if x is not
// finite. -0 becomes 0, so that the minimum of several numbers does not depend
// on their order.
KVASIR_HOST_DEVICE inline float CountedAs(float x) {
  return std::isfinite(x) ? x + 0.0f : 0.0f;
}

// Returns the code of x before it is rounded and clamped. `scale` must be above
// 0.
KVASIR_HOST_DEVICE inline float ExactCode(float x, float minimum, float scale) {
  return (x - minimum) / scale;
}
// Returns whether a code must be clamped, because `exact` rounds to a number
// below 0 or above `levels`.
KVASIR_HOST_DEVICE inline bool IsClamped(float exact, float levels) {
  return exact < -0.5f || exact >= levels + 0.5f;
}
KVASIR_HOST_DEVICE inline unsigned RoundCode(float exact, float levels) {
  const float below = exact < levels ? exact : levels;
  return static_cast<unsigned>(std::nearbyint(below > 0.0f ? below : 0.0f));
}

// Returns the code of the level that is nearest to x (LatentPart::levels). x
// must be scaled so that the mean square of its latent is 1.
KVASIR_HOST_DEVICE inline unsigned LevelCode(float x, const float* levels,
                                             int num_levels) {
  unsigned code = 0;
  for (int i = 1; i < num_levels; ++i) {
    if (x > 0.5f * (levels[i - 1] + levels[i])) ++code;
  }
  return code;
}
// Returns the factor by which a latent must be multiplied so that its mean
// square is 1. The factor is 0 if all numbers are 0, or if float32 cannot hold
// the sum of their squares.
KVASIR_HOST_DEVICE inline float UnitFactor(float square_sum, int64_t width) {
  const float factor =
      std::sqrt(static_cast<float>(width)) / std::sqrt(square_sum);
  return std::isfinite(factor) ? factor : 0.0f;
}
// Returns the scale with which a latent that is decoded from levels has the
// same L2 norm as the original one. The scale is rounded to the nearest
// finite T.
template <typename T>
KVASIR_HOST_DEVICE T LengthScale(float square_sum, float level_square_sum) {
  const float scale = std::sqrt(square_sum) / std::sqrt(level_square_sum);
  constexpr float kGreatest = DTypeOf<T>::kValue == DType::kF16 ? 65504.0f
                              : DTypeOf<T>::kValue == DType::kBf16
                                  ? 0x1.fep127f
                                  : kGreatestFloat;
  return FromFloat<T>(scale < kGreatest ? scale : kGreatest);
}

}  // namespace kvasir::kernels
