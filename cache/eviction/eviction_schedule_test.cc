#include "cache/eviction/eviction_schedule.h"

#include <algorithm>
#include <random>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvasir::cache {
namespace {

using plan::EvictionCounts;
using ::testing::Optional;

constexpr EvictionCounts kEight = {.budget_tokens = 8, .every_tokens = 4};

TEST(EvictionScheduleTest, WithoutEvictionEverySlotIsKept) {
  const EvictionSchedule schedule;
  EXPECT_FALSE(schedule.IsPoint(64));
  EXPECT_EQ(schedule.NextPoint(64), std::nullopt);
  EXPECT_EQ(schedule.SlotsBefore(64), 64);
  EXPECT_EQ(schedule.SlotsAfter(64), 64);
  EXPECT_EQ(MostSlots({}, 1000), 1000);
}

TEST(EvictionScheduleTest,
     EvictionsAreDueAtMultiplesOfTheIntervalAndAtTheEndOfThePrompt) {
  const EvictionSchedule schedule(kEight, 18);
  std::vector<int64_t> points;
  for (int64_t length = 0; length < 30; ++length) {
    if (schedule.IsPoint(length)) points.push_back(length);
  }
  // Evictions happen at multiples of 4 tokens above 8, the number of slots that
  // stay, and at the prompt's end, 18.
  EXPECT_EQ(points, (std::vector<int64_t>{12, 16, 18, 20, 24, 28}));
  EXPECT_THAT(schedule.NextPoint(0), Optional(12));
  EXPECT_THAT(schedule.NextPoint(12), Optional(16));
  EXPECT_THAT(schedule.NextPoint(16), Optional(18));
  EXPECT_THAT(schedule.NextPoint(18), Optional(20));
  EXPECT_EQ(schedule.SlotsBefore(18), 10);
  EXPECT_EQ(schedule.SlotsAfter(18), 8);
  EXPECT_EQ(schedule.SlotsBefore(20), 10);
  EXPECT_EQ(schedule.SlotsBefore(24), 12);
}

TEST(EvictionScheduleTest,
     NoTokensAreEvictedAtTheEndOfAPromptThatFitsIntoTheBudget) {
  const EvictionSchedule schedule(kEight, 5);
  EXPECT_THAT(schedule.NextPoint(0), Optional(12));
  EXPECT_EQ(schedule.SlotsAfter(11), 11);
  EXPECT_EQ(schedule.SlotsAfter(12), 8);
}

TEST(EvictionScheduleTest, ABudgetOfTheWholeSequenceLengthEvictsNothing) {
  const EvictionSchedule schedule({.budget_tokens = 512, .every_tokens = 16},
                                  400);
  for (int64_t length = 0; length <= 512; ++length) {
    ASSERT_FALSE(schedule.IsPoint(length)) << length;
  }
  EXPECT_THAT(schedule.NextPoint(400), Optional(528));
  // A budget of the whole prompt evicts nothing until there is output.
  const EvictionSchedule all({.budget_ratio = 1, .every_tokens = 16}, 400);
  EXPECT_EQ(all.SlotsAfter(400), 400);
  EXPECT_THAT(all.NextPoint(0), Optional(416));
}

TEST(EvictionScheduleTest,
     ABudgetThatIsAShareOfThePromptKeepsAtLeastTheSinksAndRecentTokens) {
  const EvictionCounts fifth = {
      .budget_ratio = 0.2, .least_tokens = 36, .every_tokens = 64};
  EXPECT_EQ(KeptSlots(fifth, 1000), 200);
  EXPECT_EQ(KeptSlots(fifth, 100), 36);
  // 200 kept slots and the 8 tokens since the last point
  EXPECT_EQ(EvictionSchedule(fifth, 1000).SlotsAfter(5000), 208);
  EXPECT_EQ(KeptSlots({.budget_ratio = 0.29, .every_tokens = 1}, 100), 29);
  EXPECT_EQ(KeptSlots({.budget_ratio = 0.001, .every_tokens = 1}, 10), 1);
}

// Regression test: the number of pages was once computed as if the output
// belonged to the prompt.
TEST(EvictionScheduleTest,
     ABudgetThatIsAShareOfThePromptDoesNotGrowWithTheOutput) {
  const EvictionCounts fifth = {
      .budget_ratio = 0.2, .least_tokens = 36, .every_tokens = 64};
  EXPECT_EQ(MostSlots(fifth, 100000), 20064);
  EXPECT_EQ(MostSlots(OfPrompt(fifth, 1000), 100000), 264);
  for (const int64_t prompt : {100, 1000}) {
    const EvictionSchedule one(fifth, prompt);
    const EvictionSchedule same(OfPrompt(fifth, prompt), prompt);
    EXPECT_EQ(one.SlotsBefore(5000), same.SlotsBefore(5000));
    EXPECT_EQ(one.SlotsAfter(5056), same.SlotsAfter(5056));
  }
  EXPECT_EQ(OfPrompt({}, 1000), EvictionCounts());
}

TEST(EvictionScheduleTest, OnlyTheLastQueriesBeforeAnEvictionAddToTheScores) {
  const auto with_window = [](int64_t window, int64_t prompt_tokens = 18) {
    EvictionCounts counts = kEight;
    counts.observation_window = window;
    return EvictionSchedule(counts, prompt_tokens);
  };
  // With a prompt of 18 tokens, the points are 12, 16 and 18.
  EXPECT_EQ(with_window(0).FirstCounted(0, 12), 0);
  EXPECT_EQ(with_window(3).FirstCounted(0, 12), 9);
  EXPECT_EQ(with_window(3).FirstCounted(0, 7), 7);  // no query counts
  EXPECT_EQ(with_window(3).FirstCounted(7, 12), 9);
  EXPECT_EQ(with_window(9).FirstCounted(12, 16), 12);
  EXPECT_EQ(with_window(1).FirstCounted(16, 18), 17);
  EXPECT_EQ(with_window(1).FirstCounted(18, 20), 18);  // output queries count
  // Nothing is evicted from a prompt of 6 tokens. Even so, only its last 2
  // queries are counted.
  EXPECT_EQ(with_window(2, 6).FirstCounted(0, 6), 4);
}

// Compares with a simulation that adds single tokens. If a sequence has more
// than K slots at a multiple of E or at the prompt's end, only K stay.
TEST(EvictionScheduleTest, ScheduleMatchesATokenByTokenSimulation) {
  std::mt19937_64 random(7);
  const auto below = [&random](int64_t limit) {
    return std::uniform_int_distribution<int64_t>(0, limit - 1)(random);
  };
  for (int i = 0; i < 500; ++i) {
    EvictionCounts counts{.every_tokens = 1 + below(20)};
    const int64_t prompt = 1 + below(90);
    if (below(2) == 0) {
      counts.budget_tokens = 1 + below(60);
    } else {
      counts.budget_ratio = static_cast<double>(1 + below(10)) / 10;
      counts.least_tokens = below(12);
    }
    SCOPED_TRACE(absl::StrCat("budget ", counts.budget_tokens, " ratio ",
                              counts.budget_ratio, " least ",
                              counts.least_tokens, " every ",
                              counts.every_tokens, " prompt ", prompt));
    const EvictionSchedule schedule(counts, prompt);
    const int64_t kept = schedule.kept_slots();
    int64_t slots = 0;
    int64_t most = 0;
    int64_t next = *schedule.NextPoint(0);
    for (int64_t length = 1; length <= 200; ++length) {
      ++slots;
      most = std::max(most, slots);
      ASSERT_EQ(schedule.SlotsBefore(length), slots) << length;
      const bool point = slots > kept && (length % counts.every_tokens == 0 ||
                                          length == prompt);
      ASSERT_EQ(schedule.IsPoint(length), point) << length;
      ASSERT_EQ(length == next, point) << length;
      if (point) {
        slots = kept;
        next = *schedule.NextPoint(length);
      }
      ASSERT_EQ(schedule.SlotsAfter(length), slots) << length;
      if (length < prompt) continue;
      ASSERT_LE(most, MostSlots(counts, length));
    }
  }
}

}  // namespace
}  // namespace kvasir::cache
