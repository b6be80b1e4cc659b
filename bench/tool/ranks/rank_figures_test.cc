#include "bench/tool/ranks/rank_figures.h"

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvasir::cli {
namespace {

using ::testing::HasSubstr;

TEST(RankFiguresTest, EachRankGetsAnEqualNumberOfThreadsButAtLeastOne) {
  EXPECT_EQ(ThreadsOfRank(8, 2), 4);
  EXPECT_EQ(ThreadsOfRank(7, 2), 3);
  EXPECT_EQ(ThreadsOfRank(2, 2), 1);
  EXPECT_EQ(ThreadsOfRank(2, 4), 1);
}

TEST(RankFiguresTest,
     ANoteReportsAThreadCountThatCannotBeDividedEquallyAmongRanks) {
  EXPECT_EQ(ThreadsNote(8, 2), "");
  EXPECT_EQ(ThreadsNote(2, 2), "");
  EXPECT_THAT(ThreadsNote(2, 4), HasSubstr("TP=1 has 2 threads, 4 ranks have 1 "
                                           "each: 4 in all, which take turns"));
  EXPECT_THAT(ThreadsNote(7, 2), HasSubstr("3 each: 6 in all, and leave cores "
                                           "idle"));
}

TEST(RankFiguresTest, CountsPerStepAreWholeNumbersIfAllStepsHaveEqualCounts) {
  RankTally tally;
  tally.Add({.calls = 7, .sent_bytes = 1000, .waited_seconds = 5},
            {.calls = 37, .sent_bytes = 1600, .waited_seconds = 5.5}, 2, 1.0);
  tally.Add({.calls = 40, .sent_bytes = 2000, .waited_seconds = 6},
            {.calls = 70, .sent_bytes = 2600, .waited_seconds = 6.25}, 2, 2.0);
  const nlohmann::ordered_json row = tally.ToJson();
  EXPECT_EQ(row.dump(),
            R"({"collectives_per_step":15,"sent_bytes_per_step":300,)"
            R"("wait_share":0.25})");
}

TEST(RankFiguresTest,
     TheErrorForRanksWithDifferentResultsNamesTheRanksAndHashes) {
  KVASIR_EXPECT_OK(CheckSameResults({7, 7, 7}));
  EXPECT_THAT(CheckSameResults({7, 7, 26}),
              base::StatusIs(absl::StatusCode::kInternal,
                             HasSubstr("is 7 on rank 0 and 1a on rank 2")));
}

// The steps have different counts, because only some of them evict.
TEST(RankFiguresTest, CountsOfStepsThatDifferAreReportedAsAnAveragePerStep) {
  RankTally tally;
  tally.Add({}, {.calls = 3, .sent_bytes = 4}, 2, 1.0);
  EXPECT_EQ(tally.ToJson()["collectives_per_step"], 1.5);
  EXPECT_EQ(tally.ToJson()["sent_bytes_per_step"], 2);
  EXPECT_EQ(tally.ToJson()["wait_share"], 0);
}

}  // namespace
}  // namespace kvasir::cli
