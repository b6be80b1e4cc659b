#include "worker/executor/graphs/step_graphs.h"

#include <gtest/gtest.h>

namespace kvasir::worker {
namespace {

StepSizes Of(int64_t tokens) { return {.tokens = tokens}; }

TEST(StepGraphsTest, TheStepsThatCameLastAreKept) {
  StepGraphs graphs;
  constexpr auto kMost = static_cast<int64_t>(StepGraphs::kMost);
  for (int64_t tokens = 0; tokens < kMost; ++tokens) {
    StepGraphs::Step* const step = graphs.Find(Of(tokens));
    EXPECT_EQ(step->key, Of(tokens));
    EXPECT_FALSE(step->seen);
    step->seen = true;
  }
  EXPECT_TRUE(graphs.Find(Of(0))->seen);
  EXPECT_FALSE(graphs.Find(Of(kMost))->seen);  // in the place of 1
  EXPECT_EQ(graphs.size(), StepGraphs::kMost);
  EXPECT_TRUE(graphs.Find(Of(0))->seen);
  EXPECT_TRUE(graphs.Find(Of(2))->seen);
  EXPECT_FALSE(graphs.Find(Of(1))->seen);
}

TEST(StepGraphsTest, MemoryThatMovesDropsThem) {
  StepGraphs graphs;
  const int here = 0, there = 0;
  graphs.UseMemory(&here);
  graphs.Find(Of(1))->seen = true;
  graphs.UseMemory(&here);
  EXPECT_TRUE(graphs.Find(Of(1))->seen);
  graphs.UseMemory(&there);
  EXPECT_EQ(graphs.size(), 0u);
}

TEST(StepGraphsTest, TrueCountsAreOfAKeyAndPaddedHistoriesAndTops) {
  StepBucket bucket;
  bucket.padded = {.tokens = 4, .samples = 4, .top = 8, .histories = 2};
  const StepSizes key = StepGraphs::KeyOf(
      {.tokens = 3, .sequences = 3, .samples = 3, .top = 5, .histories = 1},
      bucket);
  EXPECT_EQ(key, (StepSizes{.tokens = 3,
                            .sequences = 3,
                            .samples = 3,
                            .top = 8,
                            .histories = 2}));
}

}  // namespace
}  // namespace kvasir::worker
