#include "plan/normal_levels.h"

#include <gmock/gmock.h>

#include <cmath>

namespace kvasir::plan {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;

TEST(LloydMaxTest, QuantizerLevelsMatchThePublishedTableOfMax) {
  EXPECT_THAT(LloydMaxLevels(1),
              ElementsAre(DoubleNear(-0.7979, 1e-4), DoubleNear(0.7979, 1e-4)));
  EXPECT_THAT(LloydMaxLevels(2),
              ElementsAre(DoubleNear(-1.510, 1e-3), DoubleNear(-0.4528, 1e-4),
                          DoubleNear(0.4528, 1e-4), DoubleNear(1.510, 1e-3)));
  EXPECT_THAT(LloydMaxLevels(4).back(), DoubleNear(2.733, 1e-3));
  EXPECT_THAT(LloydMaxLevels(4)[8], DoubleNear(0.1284, 1e-4));
}

TEST(LloydMaxTest, QuantizerLevelsAscendAndAreSymmetricAroundZero) {
  for (int64_t bits = 1; bits <= 8; ++bits) {
    const std::vector<double> levels = LloydMaxLevels(bits);
    ASSERT_EQ(levels.size(), size_t{1} << bits);
    for (size_t i = 1; i < levels.size(); ++i) {
      EXPECT_LT(levels[i - 1], levels[i]);
    }
    EXPECT_EQ(levels.front(), -levels.back());
  }
}

TEST(RoundedLevelsTest, RoundingLevelsTwiceEqualsRoundingThemOnce) {
  for (const int bits : {1, 2, 3, 4}) {
    const std::vector<float> rounded = RoundedLevels(LloydMaxLevels(bits));
    const float step = rounded.back() / 127.0f;
    EXPECT_NEAR(rounded.back(), LloydMaxLevels(bits).back(), 1e-4);
    for (size_t i = 0; i < rounded.size(); ++i) {
      const float steps = std::nearbyint(rounded[i] / step);
      EXPECT_LE(std::abs(steps), 127.0f);
      EXPECT_EQ(steps * step, rounded[i]);
      EXPECT_NEAR(rounded[i], LloydMaxLevels(bits)[i], 0.51f * step);
    }
    const std::vector<double> again(rounded.begin(), rounded.end());
    EXPECT_EQ(RoundedLevels(again), rounded);
  }
}

}  // namespace
}  // namespace kvasir::plan
