#include "kernels/device/dtype.h"

#include <cmath>
#include <limits>

#include "gtest/gtest.h"

namespace kvasir::kernels {
namespace {

// Returns the value of a float16 number, computed from its fields.
double HalfValue(uint16_t bits) {
  const double sign = (bits & 0x8000) ? -1.0 : 1.0;
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(1024 + mantissa, exponent - 25);
}

TEST(F16Test, EveryFiniteHalfIsUnchangedByARoundTrip) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    if (((bits >> 10) & 31) == 31) continue;
    const F16 half = {static_cast<uint16_t>(bits)};
    const float value = ToFloat(half);
    ASSERT_EQ(HalfValue(half.bits), static_cast<double>(value)) << bits;
    ASSERT_EQ(half.bits, ToF16(value).bits) << bits;
  }
}

TEST(F16Test, RoundsToNearestWithTiesToEven) {
  for (uint32_t bits = 0; bits < 0x7bff; ++bits) {
    const double low = HalfValue(static_cast<uint16_t>(bits));
    const double high = HalfValue(static_cast<uint16_t>(bits + 1));
    const auto middle = static_cast<float>((low + high) / 2);
    ASSERT_EQ(bits + (bits & 1), ToF16(middle).bits) << bits;
    ASSERT_EQ(bits, ToF16(std::nextafter(middle, 0.0f)).bits) << bits;
    ASSERT_EQ(bits + 1, ToF16(std::nextafter(middle, 1e9f)).bits) << bits;
  }
}

TEST(F16Test, NumbersThatAreTooLargeBecomeInfiniteAndNanRemainsNan) {
  EXPECT_EQ(0x7bff, ToF16(65519.0f).bits);
  EXPECT_EQ(0x7c00, ToF16(65520.0f).bits);
  EXPECT_EQ(0xfc00, ToF16(-1e30f).bits);
  EXPECT_TRUE(std::isinf(ToFloat(F16{0x7c00})));
  EXPECT_TRUE(
      std::isnan(ToFloat(ToF16(std::numeric_limits<float>::quiet_NaN()))));
}

TEST(Bf16Test, RoundsToNearestWithTiesToEven) {
  for (uint32_t high = 0x3f00; high < 0x4100; ++high) {
    const uint32_t middle = (high << 16) | 0x8000;
    ASSERT_EQ(high + (high & 1), ToBf16(FloatOf(middle)).bits);
    ASSERT_EQ(high, ToBf16(FloatOf(middle - 1)).bits);
    ASSERT_EQ(high + 1, ToBf16(FloatOf(middle + 1)).bits);
    ASSERT_EQ(high, ToBf16(ToFloat(Bf16{static_cast<uint16_t>(high)})).bits);
  }
  EXPECT_TRUE(std::isnan(ToFloat(ToBf16(FloatOf(0x7f800001)))));
  EXPECT_TRUE(std::isinf(ToFloat(ToBf16(std::numeric_limits<float>::max()))));
}

}  // namespace
}  // namespace kvasir::kernels
