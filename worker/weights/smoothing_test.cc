#include "worker/weights/smoothing.h"

#include <cmath>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvasir::worker {
namespace {

using plan::RopePairing;
using ::testing::ElementsAre;

struct Norms {
  std::vector<float> q;
  std::vector<float> k;
};

Norms Smoothed(Norms norms, RopePairing pairing, int64_t rotary_dim) {
  SmoothQkNorms(pairing, rotary_dim, absl::MakeSpan(norms.q),
                absl::MakeSpan(norms.k));
  return norms;
}

TEST(SmoothingTest, QueryAndKeyWeightsAreEqualAfterSmoothing) {
  const Norms norms = Smoothed({{1, 1, 1, 1}, {16, 4, 1, 0.25}},
                               RopePairing::kHalfSplit, /*rotary_dim=*/0);
  EXPECT_THAT(norms.q, ElementsAre(4, 2, 1, 0.5));
  EXPECT_THAT(norms.k, ElementsAre(4, 2, 1, 0.5));
}

TEST(SmoothingTest, BothDimensionsOfAPairHaveTheSameFactor) {
  const Norms half = Smoothed({{1, 1, 1, 1, 1}, {64, 1, 0, 1, 16}},
                              RopePairing::kHalfSplit, /*rotary_dim=*/4);
  // The pairs are (0, 2) and (1, 3); dimension 4 is not rotated.
  EXPECT_THAT(half.q, ElementsAre(8, 1, 8, 1, 4));
  EXPECT_THAT(half.k, ElementsAre(8, 1, 0, 1, 4));
  const Norms interleaved =
      Smoothed({{1, 1, 1, 1}, {64, 0, 1, 1}}, RopePairing::kInterleaved, 4);
  EXPECT_THAT(interleaved.q, ElementsAre(8, 8, 1, 1));
  EXPECT_THAT(interleaved.k, ElementsAre(8, 0, 1, 1));
}

TEST(SmoothingTest,
     ADimensionThatHasOnlyZeroWeightsInQueriesOrKeysIsNotScaled) {
  const Norms norms = Smoothed({{0, 3, 0}, {5, 0, 0}}, RopePairing::kHalfSplit,
                               /*rotary_dim=*/0);
  EXPECT_THAT(norms.q, ElementsAre(0, 3, 0));
  EXPECT_THAT(norms.k, ElementsAre(5, 0, 0));
}

TEST(SmoothingTest, FactorsAreAtMostTwoToTheTwelfth) {
  const Norms norms = Smoothed({{1e-20F, 1e20F}, {1e20F, 1e-20F}},
                               RopePairing::kHalfSplit, /*rotary_dim=*/0);
  EXPECT_THAT(norms.q, ElementsAre(4096 * 1e-20F, 1e20F / 4096));
  EXPECT_THAT(norms.k, ElementsAre(1e20F / 4096, 4096 * 1e-20F));
}

TEST(SmoothingTest,
     SmoothingKeepsWeightProductsExactAndShortensTheWeightVectors) {
  std::mt19937 random(20261129);
  std::uniform_real_distribution<float> exponent(-4, 4);
  Norms norms;
  for (int i = 0; i < 128; ++i) {
    norms.q.push_back(std::exp2(exponent(random)));
    norms.k.push_back(-std::exp2(exponent(random)));
  }
  const Norms smoothed = Smoothed(norms, RopePairing::kHalfSplit, 64);
  const auto length = [](const std::vector<float>& numbers) {
    double sum = 0;
    for (const float number : numbers) {
      sum += static_cast<double>(number) * static_cast<double>(number);
    }
    return std::sqrt(sum);
  };
  for (size_t i = 0; i < norms.q.size(); ++i) {
    EXPECT_EQ(smoothed.q[i] * smoothed.k[i], norms.q[i] * norms.k[i]) << i;
  }
  EXPECT_LT(length(smoothed.q) * length(smoothed.k),
            0.5 * length(norms.q) * length(norms.k));
}

}  // namespace
}  // namespace kvasir::worker
