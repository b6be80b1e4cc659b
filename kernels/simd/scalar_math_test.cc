#include "kernels/simd/scalar_math.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "gtest/gtest.h"

namespace kvasir::kernels {
namespace {

TEST(ExpTest, ResultIsWithinTwoUlpOfTheExponential) {
  for (double x = -87.3; x < 88.3; x += 0.00137) {
    const auto argument = static_cast<float>(x);
    const double expected = std::exp(static_cast<double>(argument));
    const double got = static_cast<double>(Exp(argument));
    ASSERT_NEAR(1.0, got / expected, 2.4e-7) << x;
  }
}

TEST(ExpTest, ResultIsFiniteForExtremeInputsAndNaNForNaN) {
  EXPECT_EQ(1.0f, Exp(0.0f));
  EXPECT_EQ(0.0f, Exp(-std::numeric_limits<float>::infinity()));
  EXPECT_EQ(0.0f, Exp(-88.0f));
  EXPECT_TRUE(std::isfinite(Exp(std::numeric_limits<float>::infinity())));
  EXPECT_TRUE(std::isnan(Exp(std::numeric_limits<float>::quiet_NaN())));
}

TEST(NormalTailTest, ResultIsWithinAFewUlpOfTheNormalTail) {
  for (double a = 0.0; a < 13.0; a += 0.00037) {
    const auto argument = static_cast<float>(a);
    const double expected =
        std::erfc(static_cast<double>(argument) / std::sqrt(2.0)) / 2.0;
    const double got = static_cast<double>(NormalTail(argument));
    ASSERT_NEAR(1.0, got / expected, 4e-7) << a;
  }
}

TEST(NormalTailTest, ResultIsOneHalfOrZeroForExtremeInputsAndNaNForNaN) {
  EXPECT_FLOAT_EQ(0.5f, NormalTail(0.0f));
  EXPECT_EQ(0.0f, NormalTail(13.5f));
  EXPECT_EQ(0.0f, NormalTail(std::numeric_limits<float>::infinity()));
  EXPECT_TRUE(std::isnan(NormalTail(std::numeric_limits<float>::quiet_NaN())));
}

TEST(GeluTest, RelativeErrorIsAtMostFiveInTenMillion) {
  for (double x = -12.0; x < 12.0; x += 0.00037) {
    const auto argument = static_cast<float>(x);
    const double wide = static_cast<double>(argument);
    const double expected = wide * std::erfc(-wide / std::sqrt(2.0)) / 2.0;
    ASSERT_NEAR(expected, static_cast<double>(Gelu(argument)),
                5e-7 * std::abs(expected))
        << x;
  }
}

// The allowed relative error grows for negative x, because there the rounding
// of u changes exp(-2u) more. The result itself is then close to 0.
TEST(GeluTanhTest, ResultIsNearTheExactTanhFormOfGelu) {
  for (double x = -12.0; x < 12.0; x += 0.00037) {
    const auto argument = static_cast<float>(x);
    const double wide = static_cast<double>(argument);
    const double u =
        std::sqrt(2.0 / M_PI) * (wide + 0.044715 * wide * wide * wide);
    const double expected = wide / (1.0 + std::exp(-2.0 * u));
    ASSERT_NEAR(expected, static_cast<double>(GeluTanh(argument)),
                (3e-7 + 4e-7 * std::max(0.0, -u)) * std::abs(expected) + 1e-35)
        << x;
  }
}

TEST(ActivationEndsTest, ActivationsKeepNaNAndReachTheirLimitsForLargeInputs) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  for (float (*activate)(float) : {&Gelu, &GeluTanh, &Relu, &Silu}) {
    EXPECT_TRUE(std::isnan(activate(nan)));
    EXPECT_EQ(1e4f, activate(1e4f));
    EXPECT_EQ(infinity, activate(infinity));
    for (const float far :
         {1e4f, 1e20f, 1e38f, std::numeric_limits<float>::max(), infinity}) {
      EXPECT_EQ(0.0f, activate(-far));
      EXPECT_EQ(far, activate(far));
    }
    EXPECT_EQ(0.0f, activate(0.0f));
  }
}

TEST(SinCosTest, SineAndCosineAreAccurateInAllQuartersOfATurn) {
  double worst = 0.0;
  for (uint64_t i = 0; i < 100000; ++i) {
    const uint64_t turns = i * 0x9e3779b97f4a7c15u;
    const ReducedAngle angle = ReduceTurns(turns);
    float sine, cosine;
    SinCosReduced(angle.remainder, &sine, &cosine);
    RotateByQuarter(angle.quarter, sine, cosine, &sine, &cosine);
    const double radians =
        static_cast<double>(turns) * (2.0 * M_PI / 18446744073709551616.0);
    worst = std::max(
        {worst, std::abs(std::sin(radians) - static_cast<double>(sine)),
         std::abs(std::cos(radians) - static_cast<double>(cosine))});
  }
  EXPECT_LT(worst, 1.2e-7);  // an ulp of numbers just below 1 is 6e-8
}

TEST(TreeTest, TreeSumAndTreeMaxIncludeEveryVectorLane) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = static_cast<float>(1 << i);
  EXPECT_EQ(65535.0f, TreeSum(lanes));
  for (int i = 0; i < kLanes; ++i) lanes[i] = static_cast<float>(i * 7 % 16);
  EXPECT_EQ(15.0f, TreeMax(lanes));
}

}  // namespace
}  // namespace kvasir::kernels
