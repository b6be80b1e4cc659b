#include "bench/floors.h"

#include "gtest/gtest.h"

namespace kvasir::bench {
namespace {

constexpr Ceilings kMachine = {.bytes_per_second = 10.0, .flops = 100.0};

FloorSamples Pairs(int count, double seconds, double baseline) {
  FloorSamples samples;
  for (int i = 0; i < count; ++i) samples.Add(seconds, baseline, kMachine);
  return samples;
}

TEST(FloorsTest, TheShortestPossibleTimeIsTheLargerOfMemoryTimeAndComputeTime) {
  EXPECT_DOUBLE_EQ(FloorSeconds({.bytes = 20, .flops = 100}, kMachine), 2.0);
  EXPECT_DOUBLE_EQ(FloorSeconds({.bytes = 20, .flops = 300}, kMachine), 3.0);
}

TEST(FloorsTest, EachTimeIsComparedWithTheMachineLimitsMeasuredTogetherWithIt) {
  FloorSamples samples = Pairs(7, 4.0, 8.0);
  EXPECT_DOUBLE_EQ(FloorRatio(samples, {.bytes = 20, .flops = 1}).median, 2.0);
  // If a launch takes twice as long because the machine has half the speed, its
  // ratio to the floor is the same.
  for (size_t i = 0; i < 7; ++i) {
    samples.seconds[i] *= static_cast<double>(i + 1);
    samples.ceilings[i].bytes_per_second /= static_cast<double>(i + 1);
  }
  const PairedRatio ratio = FloorRatio(samples, {.bytes = 20, .flops = 1});
  EXPECT_DOUBLE_EQ(ratio.median, 2.0);
  EXPECT_NEAR(ratio.spread, 0.0, 1e-12);
  EXPECT_FALSE(ratio.undecided());
}

TEST(FloorsTest, TheBandwidthShareOfALaunchDoesNotDependOnItsFlops) {
  const LaunchCost cost = {.bytes = 20, .flops = 1000};
  EXPECT_DOUBLE_EQ(BandwidthShare(Pairs(7, 8.0, 8.0), cost).median, 0.25);
  EXPECT_TRUE(IsComputeBound(Pairs(7, 8.0, 8.0), cost));
  EXPECT_FALSE(IsComputeBound(Pairs(7, 8.0, 8.0), {.bytes = 20, .flops = 1}));
}

TEST(FloorsTest, ARatioWhoseSamplesVaryWidelyIsUndecided) {
  FloorSamples samples = Pairs(9, 4.0, 8.0);
  for (size_t i = 0; i < 9; i += 2) samples.seconds[i] = 5.0;
  EXPECT_TRUE(FloorRatio(samples, {.bytes = 20, .flops = 1}).undecided());
}

}  // namespace
}  // namespace kvasir::bench
