#include "compress/evaluate/paired_interval.h"

#include <cmath>

#include "gtest/gtest.h"

namespace kvasir::compress {
namespace {

TEST(PairedIntervalTest, QuantilesOfTheTDistributionEqualPublishedValues) {
  EXPECT_NEAR(TQuantile(0.975, 1), 12.7062, 1e-3);
  EXPECT_NEAR(TQuantile(0.975, 2), 4.30265, 1e-4);
  EXPECT_NEAR(TQuantile(0.975, 10), 2.22814, 1e-5);
  EXPECT_NEAR(TQuantile(0.95, 30), 1.69726, 1e-5);
  EXPECT_NEAR(TQuantile(0.975, 100), 1.98397, 1e-5);
  EXPECT_NEAR(TQuantile(0.975, 100000), 1.95999, 1e-4);
}

TEST(PairedIntervalTest,
     TheMeanAndConfidenceIntervalOfThreeNumbersAreThoseOfTheFormula) {
  const PairedInterval interval = MeanWithInterval({1.0, 2.0, 3.0});
  EXPECT_DOUBLE_EQ(interval.mean, 2.0);
  // The standard deviation is 1, so the standard error is 1 / sqrt(3).
  EXPECT_NEAR(interval.high - 2.0, 4.30265 / std::sqrt(3.0), 1e-4);
  EXPECT_NEAR(interval.high - 2.0, 2.0 - interval.low, 1e-12);
}

TEST(PairedIntervalTest, TheConfidenceIntervalOfASingleNumberIsInfinite) {
  EXPECT_TRUE(std::isinf(MeanWithInterval({1.0}).high));
  EXPECT_EQ(MeanWithInterval({0.5, 0.5}).high, 0.5);
}

}  // namespace
}  // namespace kvasir::compress
