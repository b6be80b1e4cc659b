#include "worker/executor/graphs/step_graphs.h"

#include <gtest/gtest.h>

#include <vector>

#include "base/status_matchers.h"
#include "base/thread_pool.h"
#include "kernels/device/device.h"

namespace kvasir::worker {
namespace {

StepSizes Of(int64_t tokens) { return {.tokens = tokens}; }

TEST(StepGraphsTest, OnlyTheMostRecentlyUsedStepGraphsAreKept) {
  StepGraphs graphs;
  constexpr auto kMost = static_cast<int64_t>(StepGraphs::kMost);
  for (int64_t tokens = 0; tokens < kMost; ++tokens) {
    StepGraphs::Step* const step = graphs.Find(Of(tokens));
    EXPECT_EQ(step->key, Of(tokens));
    EXPECT_FALSE(step->seen);
    step->seen = true;
  }
  EXPECT_TRUE(graphs.Find(Of(0))->seen);
  EXPECT_FALSE(graphs.Find(Of(kMost))->seen);  // replaces the step of 1 token
  EXPECT_EQ(graphs.size(), StepGraphs::kMost);
  EXPECT_TRUE(graphs.Find(Of(0))->seen);
  EXPECT_TRUE(graphs.Find(Of(2))->seen);
  EXPECT_FALSE(graphs.Find(Of(1))->seen);
}

TEST(StepGraphsTest, AllStepGraphsAreDroppedWhenTheBlobMayHaveMoved) {
  StepGraphs graphs;
  graphs.UseBlob(1);
  graphs.Find(Of(1))->seen = true;
  graphs.UseBlob(1);
  EXPECT_TRUE(graphs.Find(Of(1))->seen);
  graphs.UseBlob(2);
  EXPECT_EQ(graphs.size(), 0u);
}

// Regression test: ranks dropped their graphs when the blob's address changed.
// A rank whose new blob had the old address replayed a graph although the other
// ranks did not.
TEST(StepGraphsTest, ABlobCountsItsPeaksBySizeWhateverItsAddressIs) {
  base::ThreadPool pool(1);
  kernels::CpuDevice device(&pool);
  StepBlob small(&device.allocator());
  StepBlob large(&device.allocator());
  const auto pack = [](StepBlob& blob, int64_t count) {
    blob.StartCounting();
    blob.Take<int64_t>(count);
    KVASIR_ASSERT_OK(blob.StartPacking());
    blob.Take<int64_t>(count);
  };
  pack(large, 1 << 16);
  const int64_t before = large.peaks() - small.peaks();
  std::vector<int64_t> peaks;
  for (const int64_t count : {100, 900, 900, 1000, 50, 8000}) {
    const size_t held = small.bytes();
    const int64_t peaked = small.peaks();
    pack(small, count);
    pack(large, count);
    peaks.push_back(small.peaks());
    EXPECT_TRUE(small.bytes() == held || small.peaks() > peaked) << count;
  }
  EXPECT_EQ(peaks, (std::vector<int64_t>{1, 2, 2, 3, 3, 4}));
  // The first step of `large` was its largest step, so no later step was a
  // peak.
  EXPECT_EQ(large.peaks(), before);
}

TEST(StepGraphsTest, AGraphKeyPadsOnlyTheNumbersOfHistoriesAndOfTopLogprobs) {
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
