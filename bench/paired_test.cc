#include "bench/paired.h"

#include "gtest/gtest.h"

namespace kvasir::bench {
namespace {

TEST(PairedTest, ARatioHasTheMedianAndInterquartileRangeOfItsPairs) {
  const PairedRatio ratio =
      RatioOf({1, 2, 3, 4, 5, 6, 7}, {10, 10, 10, 10, 10, 10, 10});
  EXPECT_DOUBLE_EQ(ratio.median, 0.4);
  EXPECT_NEAR(ratio.spread, 0.3 / 0.4, 0.2);
  EXPECT_EQ(ratio.pairs, 7u);
  EXPECT_TRUE(ratio.undecided());
}

TEST(PairedTest, ARatioOfFewerThanSevenPairsIsUndecidedEvenIfAllPairsAgree) {
  EXPECT_TRUE(RatioOf(std::vector<double>(6, 1.0), std::vector<double>(6, 2.0))
                  .undecided());
  EXPECT_FALSE(RatioOf(std::vector<double>(7, 1.0), std::vector<double>(7, 2.0))
                   .undecided());
}

TEST(PairedTest, ADifferenceIsUndecidedIfItsMedianChangesDuringTheRun) {
  // The differences of single pairs vary by half of their median, but if the
  // run is divided into seven parts, the medians of all parts are equal.
  std::vector<double> a;
  std::vector<double> b;
  for (int i = 0; i < 210; ++i) {
    b.push_back(1000.0 + i);
    a.push_back(b.back() + 1.0 + 0.5 * (i % 3 - 1));
  }
  EXPECT_DOUBLE_EQ(DifferenceOf(a, b).median, 1.0);
  EXPECT_DOUBLE_EQ(DifferenceOf(a, b).spread, 0.0);
  EXPECT_FALSE(DifferenceOf(a, b).undecided());
  // The differences in the second half of the run are three times those of the
  // first half, so the difference is undecided. The ratio of the two sides
  // hardly changes.
  for (size_t i = 105; i < a.size(); ++i) a[i] += 2.0;
  EXPECT_FALSE(RatioOf(a, b).undecided());
  EXPECT_TRUE(DifferenceOf(a, b).undecided());
}

}  // namespace
}  // namespace kvasir::bench
