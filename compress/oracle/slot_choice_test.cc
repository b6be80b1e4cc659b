#include "compress/oracle/slot_choice.h"

#include <algorithm>
#include <random>

#include "absl/strings/str_cat.h"
#include "cache/eviction/eviction_schedule.h"
#include "cache/testing/eviction_reference.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvasir::compress {
namespace {

using ::testing::ElementsAre;

plan::ResolvedEviction Rule(int64_t sinks, int64_t recent, float lambda) {
  plan::ResolvedEviction rule;
  rule.sinks = sinks;
  rule.recent = recent;
  rule.lambda = lambda;
  return rule;
}

TEST(SlotChoiceTest, SinksAndRecentSlotsAreAlwaysKept) {
  const std::vector<float> mass = {0, 5, 1, 3, 2, 0};
  const SlotScores scores = {.mass = mass};
  EXPECT_THAT(ChooseSlots(Rule(1, 2, 1), scores, 4), ElementsAre(0, 1, 4, 5));
  EXPECT_THAT(ChooseSlots(Rule(1, 2, 1), scores, 3), ElementsAre(0, 4, 5));
  EXPECT_THAT(ChooseSlots(Rule(0, 1, 1), scores, 3), ElementsAre(1, 3, 5));
  EXPECT_THAT(ChooseSlots(Rule(2, 4, 1), scores, 6),
              ElementsAre(0, 1, 2, 3, 4, 5));
  plan::ResolvedEviction latest = Rule(1, 1, 1);
  latest.scored = false;
  EXPECT_THAT(ChooseSlots(latest, scores, 3), ElementsAre(0, 4, 5));
}

TEST(SlotChoiceTest, AmongEqualScoresTheLowerSlotIsKept) {
  const std::vector<float> mass = {1, 1, 1, 1, 1, 1};
  EXPECT_THAT(ChooseSlots(Rule(0, 1, 0.5F), {.mass = mass}, 3),
              ElementsAre(0, 1, 5));
}

TEST(SlotChoiceTest, TheFriendlinessToQuantizationHasTheWeightOneMinusLambda) {
  const std::vector<float> mass = {4, 3, 2, 0, 9};
  const std::vector<float> key = {1, 0, 0.5F, 0, 7};
  const std::vector<float> value = {1, 1, 0, 1, 7};
  const SlotScores scores = {mass, key, value};
  // The last slot is recent, so slots 0 to 3 are candidates. With a lambda of 1
  // their scores are the normalized masses 1, 3/4, 1/2 and 0.
  EXPECT_THAT(ChooseSlots(Rule(0, 1, 1), scores, 3), ElementsAre(0, 1, 4));
  // With a lambda of 0 the scores are (1 - Ek) + (1 - Ev), which is 0, 1, 1.5
  // and 1.
  EXPECT_THAT(ChooseSlots(Rule(0, 1, 0), scores, 2), ElementsAre(2, 4));
  EXPECT_THAT(ChooseSlots(Rule(0, 1, 0.5F), scores, 3), ElementsAre(1, 2, 4));
  // A friendliness factor of 0.5 halves the weight of the errors. With a lambda
  // of 0.75, slot 0 then has the best score.
  plan::ResolvedEviction half = Rule(0, 1, 0.75F);
  half.friendliness = 0.5F;
  EXPECT_THAT(ChooseSlots(half, scores, 2), ElementsAre(0, 4));
  // Without codes there are no errors, so slots differ only in mass.
  EXPECT_THAT(ChooseSlots(Rule(0, 1, 0.1F), {.mass = mass}, 2),
              ElementsAre(0, 4));
}

// Compares thousands of steps with random scores to a simple implementation of
// the policy. Scores take only a few values, so that ties are frequent. The
// smallest budget is one slot.
TEST(SlotChoiceTest, TheChoiceEqualsThatOfASimpleImplementationOfThePolicy) {
  std::mt19937_64 random(11);
  const auto below = [&random](int64_t limit) {
    return std::uniform_int_distribution<int64_t>(0, limit - 1)(random);
  };
  int64_t evictions = 0;
  for (int run = 0; run < 60; ++run) {
    const int64_t kinds = run % 3 == 0 ? 3 : 1000;
    const auto draw = [&] { return static_cast<float>(below(kinds)) / 8.0F; };
    plan::ResolvedEviction rule =
        Rule(below(4), 1 + below(5), static_cast<float>(below(5)) / 4.0F);
    rule.scored = below(6) != 0;
    rule.friendliness = below(2) == 0 ? 1.0F : 0.5F;
    rule.decay = below(2) == 0 ? 1.0F : 0.9F;
    plan::EvictionCounts counts{.every_tokens = 1 + below(9)};
    counts.least_tokens = rule.sinks + rule.recent;
    if (below(2) == 0) {
      counts.budget_tokens = counts.least_tokens + below(12);
    } else {
      counts.budget_ratio = static_cast<double>(1 + below(9)) / 10;
    }
    const int64_t prompt = 1 + below(60);
    const cache::EvictionSchedule schedule(counts, prompt);
    cache::EvictionReference reference(rule, counts, prompt);
    SCOPED_TRACE(absl::StrCat("run ", run));
    for (int64_t length = 0; length < 150; ++length) {
      std::vector<float> mass;
      std::vector<float> key;
      std::vector<float> value;
      for (const auto& slot : reference.slots()) {
        mass.push_back(slot.mass);
        key.push_back(slot.key_error);
        value.push_back(slot.value_error);
      }
      const std::vector<int32_t> stayed = reference.Append(draw(), draw());
      ASSERT_EQ(!stayed.empty(), schedule.IsPoint(length)) << length;
      if (!stayed.empty()) {
        ++evictions;
        const std::vector<int64_t> chosen =
            ChooseSlots(rule, {mass, key, value}, schedule.kept_slots());
        ASSERT_TRUE(std::equal(chosen.begin(), chosen.end(), stayed.begin(),
                               stayed.end()))
            << length;
      }
      ASSERT_EQ(static_cast<int64_t>(reference.slots().size()),
                schedule.SlotsAfter(length) + 1);
      for (auto& slot : reference.slots()) slot.mass += draw();
    }
  }
  EXPECT_GT(evictions, 1000);
}

}  // namespace
}  // namespace kvasir::compress
