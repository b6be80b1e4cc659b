#include "compress/planner/kappa.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/status_matchers.h"

namespace kvasir::compress {
namespace {

using ::kvasir::base::StatusIs;

TEST(KappaTest, QuantilesAreInterpolatedBetweenSortedNumbers) {
  EXPECT_DOUBLE_EQ(Quantile({3, 1, 2}, 0.5), 2);
  EXPECT_DOUBLE_EQ(Quantile({4, 1, 2, 3}, 0.5), 2.5);
  EXPECT_DOUBLE_EQ(Quantile({0, 10}, 0.16), 1.6);
  EXPECT_DOUBLE_EQ(Quantile({7}, 0.84), 7);
}

// Without ties, the correlation of the 5 numbers is 1 - 6 (1 + 1 + 0 + 1 + 1) /
// (5 * 24) = 0.8.
TEST(KappaTest, TheRankCorrelationDependsOnlyOnTheOrder) {
  EXPECT_DOUBLE_EQ(SpearmanCorrelation({1, 2, 3}, {10, 20, 3000}), 1);
  EXPECT_DOUBLE_EQ(SpearmanCorrelation({1, 2, 3}, {9, 4, 1}), -1);
  EXPECT_NEAR(SpearmanCorrelation({1, 2, 3, 4, 5}, {2, 1, 3, 5, 4}), 0.8,
              1e-12);
  EXPECT_DOUBLE_EQ(SpearmanCorrelation({1, 2}, {5, 5}), 0);
  // In the first list the ranks are 0, 1.5, 1.5 and 3.
  EXPECT_NEAR(SpearmanCorrelation({1, 2, 2, 3}, {1, 2, 3, 4}), 0.9486832981,
              1e-9);
}

TEST(KappaTest, KappaIsTheMedianOfMeasuredDividedByPredictedDivergence) {
  auto kappa = FitKappa({{10, 1, 2}, {20, 2, 3}, {30, 4, 12}, {40, 1, 9}});
  KVASIR_ASSERT_OK(kappa);
  EXPECT_DOUBLE_EQ(kappa->median, 2.5);
  EXPECT_DOUBLE_EQ(kappa->low, 1.5 + 0.48 * 0.5);
  EXPECT_DOUBLE_EQ(kappa->high, 3 + 0.52 * 6);
  EXPECT_FALSE(kappa->spearman.has_value());
  EXPECT_EQ(kappa->trials.size(), 4u);
  kappa = FitKappa({{1, 5, 5}, {2, 4, 4}, {3, 3, 3}, {4, 2, 2}, {5, 1, 1}});
  KVASIR_ASSERT_OK(kappa);
  EXPECT_DOUBLE_EQ(kappa->spearman.value(), 1);
}

TEST(KappaTest, MissingTrialsAndDivergencesThatAreNotPositiveAreRefused) {
  EXPECT_THAT(FitKappa({}),
              StatusIs(absl::StatusCode::kInvalidArgument, ::testing::_));
  EXPECT_THAT(FitKappa({{10, 1, 0}}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       ::testing::HasSubstr("a plan of 10 bytes")));
  EXPECT_THAT(FitKappa({{10, 0, 1}}),
              StatusIs(absl::StatusCode::kInvalidArgument, ::testing::_));
}

}  // namespace
}  // namespace kvasir::compress
