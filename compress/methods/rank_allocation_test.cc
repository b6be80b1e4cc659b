#include "compress/methods/rank_allocation.h"

#include <cmath>
#include <random>

#include "base/status_matchers.h"

namespace kvasir::compress {
namespace {

using ::kvasir::base::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<int64_t> Allocate(const RankPool& pool) {
  const auto ranks = AllocateRanks(pool);
  KVASIR_EXPECT_OK(ranks);
  return ranks.ok() ? *ranks : std::vector<int64_t>{};
}

TEST(RankAllocationTest, SharesAreProportionalToScores) {
  EXPECT_THAT(Allocate({.units = {{1, 64}, {2, 64}, {5, 64}}, .target = 64}),
              ElementsAre(8, 16, 40));
}

TEST(RankAllocationTest,
     RanksLeftOverByRoundingGoToTheGroupsWithTheLargestRemainders) {
  // The shares 6.4, 12.8 and 44.8 are rounded down to 4, 12 and 44. One step of
  // 4 is left for the first unit, because the remainders are 2.4, 0.8 and 0.8.
  EXPECT_THAT(
      Allocate(
          {.units = {{1, 64}, {2, 64}, {7, 64}}, .target = 64, .multiple = 4}),
      ElementsAre(8, 12, 44));
}

TEST(RankAllocationTest,
     RanksThatAFullGroupCannotUseAreSharedByTheOtherGroupsInProportion) {
  // The shares are 8, 8 and 80. The third is limited to 48, so the other two
  // share the remaining 48 equally.
  EXPECT_THAT(Allocate({.units = {{1, 48}, {1, 48}, {10, 48}}, .target = 96}),
              ElementsAre(24, 24, 48));
}

TEST(RankAllocationTest, EveryGroupKeepsARankOfAtLeastOneRankMultiple) {
  EXPECT_THAT(Allocate({.units = {{0, 64}, {1e-9, 64}, {1, 64}},
                        .target = 48,
                        .multiple = 8}),
              ElementsAre(8, 8, 32));
}

TEST(RankAllocationTest,
     GroupsWithAScoreOfZeroGetOnlyRanksThatOtherGroupsCannotUse) {
  EXPECT_THAT(
      Allocate(
          {.units = {{0, 16}, {1, 16}, {0, 16}}, .target = 40, .multiple = 8}),
      ElementsAre(16, 16, 8));
}

TEST(RankAllocationTest, AGroupNarrowerThanARankMultipleIsKeptWhole) {
  EXPECT_THAT(
      Allocate({.units = {{1, 6}, {1, 64}}, .target = 40, .multiple = 16}),
      ElementsAre(6, 32));
}

TEST(RankAllocationTest,
     TheRankOfAGroupThatIsKeptWholeNeedNotBeAMultipleOfTheRankMultiple) {
  EXPECT_THAT(
      Allocate({.units = {{1, 20}, {1, 20}}, .target = 40, .multiple = 8}),
      ElementsAre(20, 20));
  EXPECT_THAT(
      Allocate({.units = {{2, 20}, {1, 20}}, .target = 36, .multiple = 8}),
      ElementsAre(20, 16));
}

TEST(RankAllocationTest, RanksOfUnitsWithEqualScoresDifferByAtMostOneStep) {
  EXPECT_THAT(Allocate({.units = {{3, 32}, {3, 32}, {3, 32}, {3, 32}},
                        .target = 56,
                        .multiple = 8}),
              ElementsAre(16, 16, 16, 8));
}

TEST(RankAllocationTest, AllCopiesOfAUnitGetTheSameRank) {
  // One step costs 3 * 8 for the first unit, which has three copies, and 8 for
  // the second. With the target 63, each rank would be 15.75 before rounding.
  EXPECT_THAT(
      Allocate(
          {.units = {{1, 32, 3}, {1, 32, 1}}, .target = 63, .multiple = 8}),
      ElementsAre(16, 8));
  EXPECT_THAT(
      Allocate(
          {.units = {{1, 32, 3}, {1, 32, 1}}, .target = 64, .multiple = 8}),
      ElementsAre(16, 16));
}

TEST(RankAllocationTest, IfTheBudgetSufficesForEverythingGroupsAreKeptWhole) {
  EXPECT_THAT(
      Allocate({.units = {{1, 24}, {9, 40}}, .target = 64, .multiple = 16}),
      ElementsAre(24, 40));
  EXPECT_THAT(
      Allocate({.units = {{0, 24}, {9, 40}}, .target = 1000, .multiple = 16}),
      ElementsAre(24, 40));
}

TEST(RankAllocationTest, RoundRanksRoundsGivenSharesAsAllocateRanksDoes) {
  const RankPool pool{
      .units = {{0, 64}, {0, 64}, {0, 64}}, .target = 64, .multiple = 8};
  const auto ranks = RoundRanks(pool, {11.0, 22.5, 30.5});
  KVASIR_ASSERT_OK(ranks);
  EXPECT_THAT(*ranks, ElementsAre(8, 24, 32));
  EXPECT_THAT(RoundRanks(pool, {40, 40, 40}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("56 numbers per token more than the budget")));
}

TEST(RankAllocationTest,
     WithRandomScoresTheWholeBudgetIsUsedAndAHigherScoreNeverGetsALowerRank) {
  std::mt19937_64 random(11);
  const auto below = [&random](int64_t limit) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(limit));
  };
  for (int round = 0; round < 300; ++round) {
    const int64_t multiple = int64_t{1} << below(5);
    const int64_t most = multiple * (1 + below(9));
    RankPool pool{.multiple = multiple};
    const int64_t count = 1 + below(20);
    for (int64_t i = 0; i < count; ++i) {
      const double score = std::exp(static_cast<double>(below(1200)) / 100);
      pool.units.push_back({.score = score, .max_rank = most});
    }
    const int64_t least = count * multiple;
    pool.target = least + below(count * most - least + 1);
    const std::vector<int64_t> ranks = Allocate(pool);
    ASSERT_EQ(ranks.size(), pool.units.size());
    // The sum must be the largest multiple of `multiple` within the target.
    EXPECT_EQ(TotalRank(pool, ranks), pool.target / multiple * multiple);
    for (size_t i = 0; i < ranks.size(); ++i) {
      EXPECT_GE(ranks[i], multiple);
      EXPECT_LE(ranks[i], most);
      EXPECT_EQ(ranks[i] % multiple, 0);
      for (size_t j = 0; j < ranks.size(); ++j) {
        if (pool.units[i].score > pool.units[j].score) {
          EXPECT_GE(ranks[i], ranks[j]);
        }
      }
    }
  }
}

TEST(RankAllocationTest, GroupScoresMaySpanTheWholeRangeOfDoubles) {
  EXPECT_THAT(Allocate({.units = {{5e-324, 64}, {1e-300, 64}, {1e300, 64}},
                        .target = 96,
                        .multiple = 8}),
              ElementsAre(8, 24, 64));
}

TEST(RankAllocationTest, InvalidPoolsAreRefused) {
  const auto invalid = [](const char* text) {
    return StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text));
  };
  EXPECT_THAT(
      AllocateRanks({.units = {{1, 64}, {1, 64}}, .target = 15, .multiple = 8}),
      invalid("the budget is 15 numbers per token, but the least ranks of all "
              "latents, with a rank multiple of 8, take 16: lower "
              "--rank-multiple"));
  EXPECT_THAT(AllocateRanks({.units = {{0, 64}}, .target = 32}),
              invalid("the score of every unit is zero"));
  EXPECT_THAT(AllocateRanks({.units = {{std::nan(""), 64}}, .target = 32}),
              invalid("the score of unit 0 must be finite"));
  EXPECT_THAT(AllocateRanks({.units = {{-1, 64}}, .target = 32}),
              invalid("is -1"));
  EXPECT_THAT(AllocateRanks({.units = {{1, 0}}, .target = 32}),
              invalid("greatest rank"));
}

}  // namespace
}  // namespace kvasir::compress
