#include "worker/engine/eviction_limits.h"

#include <limits>

#include "base/status_matchers.h"
#include "plan/eviction.h"
#include "plan/plan.h"

namespace kvasir::worker {
namespace {

using base::StatusIs;
using plan::EvictionCounts;
using proto::EvictionBudget;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Limits of three page groups: one without eviction, one that keeps a fifth of
// the prompt, and one that keeps 100 slots.
EvictionLimits Limits() {
  EvictionLimits limits;
  limits.groups.resize(3);
  for (EvictionLimits::Group& group : limits.groups) {
    group.pages.page_tokens = 16;
    group.num_pages = 1000;
  }
  limits.groups[1].pages.eviction = {
      .budget_ratio = 0.2, .least_tokens = 36, .every_tokens = 64};
  limits.groups[1].least_slots = 36;
  limits.groups[2].pages.eviction = {.budget_tokens = 100, .every_tokens = 32};
  limits.groups[2].least_slots = 20;
  return limits;
}

EvictionBudget Budget(const char* text) {
  return proto::ParseEvictionBudget(text).value();
}

void ExpectRefused(const EvictionLimits& limits, const EvictionBudget& budget,
                   int64_t prompt_tokens, const std::string& why) {
  EXPECT_THAT(
      CheckEvictionBudget(budget, {prompt_tokens, prompt_tokens + 100}, limits),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(why)));
}

TEST(EvictionLimitsTest, ARequestMayHaveALargerEvictionBudgetThanThePlan) {
  const EvictionLimits limits = Limits();
  for (const char* text : {"0.2", "0.5", "1", "100", "4000"}) {
    KVASIR_EXPECT_OK(
        CheckEvictionBudget(Budget(text), {500, 500 + 100}, limits))
        << text;
  }
  EXPECT_THAT(
      EvictionsOf(Budget("0.5"), limits),
      ElementsAre(
          EvictionCounts{},
          EvictionCounts{
              .budget_ratio = 0.5, .least_tokens = 36, .every_tokens = 64},
          EvictionCounts{
              .budget_ratio = 0.5, .least_tokens = 20, .every_tokens = 32}));
  EXPECT_THAT(
      EvictionsOf(Budget("300"), limits),
      ElementsAre(EvictionCounts{},
                  EvictionCounts{.budget_tokens = 300, .every_tokens = 64},
                  EvictionCounts{.budget_tokens = 300, .every_tokens = 32}));
  EXPECT_THAT(EvictionsOf(Budget("1"), limits),
              ElementsAre(EvictionCounts{}, EvictionCounts{}, EvictionCounts{}))
      << "no token of prompt or output is evicted";
}

TEST(EvictionLimitsTest,
     ARequestForThePlansBudgetGetsTheEvictionCountsOfThePlan) {
  EvictionLimits limits = Limits();
  limits.groups.pop_back();
  EXPECT_EQ(EvictionsOf(Budget("0.2"), limits)[1],
            limits.groups[1].pages.eviction);
}

TEST(EvictionLimitsTest,
     ABudgetBelowThatOfThePlanIsRefusedUnlessTheOperatorAllowsIt) {
  EvictionLimits limits = Limits();
  ExpectRefused(limits, Budget("0.1"), 1000,
                "eviction_budget is 0.1 and keeps 100 slots at 1000 prompt "
                "tokens, want at least 200: the served plan keeps that many");
  limits.min_budget = Budget("0.1");
  KVASIR_EXPECT_OK(
      CheckEvictionBudget(Budget("0.1"), {1000, 1000 + 100}, limits));
  KVASIR_EXPECT_OK(
      CheckEvictionBudget(Budget("100"), {1000, 1000 + 100}, limits));
  ExpectRefused(
      limits, Budget("99"), 1000,
      "eviction_budget is 99 and keeps 99 slots at 1000 prompt "
      "tokens, want at least 100: the server's smallest budget is 0.1");
  limits.min_budget = Budget("150");
  ExpectRefused(limits, Budget("149"), 1000, "want at least 150");
  KVASIR_EXPECT_OK(
      CheckEvictionBudget(Budget("150"), {1000, 1000 + 100}, limits));
}

TEST(EvictionLimitsTest, ThePlansBudgetIsAllowedEvenBelowTheOperatorsMinimum) {
  EvictionLimits limits = Limits();
  limits.min_budget = Budget("1");
  KVASIR_EXPECT_OK(
      CheckEvictionBudget(Budget("0.2"), {1000, 1000 + 100}, limits));
  ExpectRefused(limits, Budget("0.1"), 1000, "the served plan keeps that many");
}

TEST(EvictionLimitsTest, ABudgetMustHaveRoomForSinksAndRecentTokens) {
  EvictionLimits limits = Limits();
  limits.min_budget = Budget("2");
  ExpectRefused(limits, Budget("35"), 40,
                "eviction_budget is 35 slots, want at least 36: sinks and "
                "recent tokens always stay");
  KVASIR_EXPECT_OK(CheckEvictionBudget(Budget("36"), {40, 40 + 100}, limits));
  // One per cent of the prompt is less than the slots of sinks and recent
  // tokens. The ratio is accepted, because these slots are kept in any case.
  limits.min_budget = Budget("0.01");
  KVASIR_EXPECT_OK(
      CheckEvictionBudget(Budget("0.01"), {100, 100 + 100}, limits));
}

TEST(EvictionLimitsTest, APlanThatEvictsNothingRefusesEveryBudget) {
  for (const char* text : {"0.5", "1", "256"}) {
    ExpectRefused({}, Budget(text), 100, "the served plan evicts nothing");
    ExpectRefused({.groups = {{}}}, Budget(text), 100,
                  "the served plan evicts nothing");
  }
  EXPECT_THAT(
      CheckEvictionLimits({.groups = {{}}, .min_budget = Budget("0.1")}),
      StatusIs(
          absl::StatusCode::kInvalidArgument,
          HasSubstr("--eviction-min-budget is 0.1, but the served plan evicts "
                    "nothing")));
  KVASIR_EXPECT_OK(CheckEvictionLimits({.groups = {{}}}));
  EvictionLimits limits = Limits();
  limits.min_budget = Budget("0.1");
  KVASIR_EXPECT_OK(CheckEvictionLimits(limits));
}

TEST(EvictionLimitsTest, ABudgetThatLetsASequenceOutgrowThePoolIsRefused) {
  EvictionLimits limits = Limits();
  limits.groups[2].num_pages = 30;  // 30 * 16 = 480 slots
  KVASIR_EXPECT_OK(CheckEvictionBudget(Budget("1"), {400, 480}, limits));
  EXPECT_THAT(CheckEvictionBudget(Budget("1"), {400, 481}, limits),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("eviction_budget is 1: prompt and output of "
                                 "481 tokens then take 31 pages of page group "
                                 "2, want at most its 30")));
  // A budget of 448 slots needs the pool's 480 slots, because 32 more slots are
  // added before the next eviction.
  limits.min_budget = Budget("2");
  KVASIR_EXPECT_OK(CheckEvictionBudget(Budget("448"), {400, 9000}, limits));
  ExpectRefused(limits, Budget("449"), 9000, "take 31 pages of page group 2");
}

// With eviction a sequence may have more tokens than the model has positions,
// but not more slots.
TEST(EvictionLimitsTest, ABudgetOfMoreSlotsThanTheModelHasPositionsIsRefused) {
  EvictionLimits limits = Limits();
  limits.max_slots = 512;
  limits.min_budget = Budget("2");
  KVASIR_EXPECT_OK(CheckEvictionBudget(Budget("448"), {400, 9000}, limits));
  KVASIR_EXPECT_OK(CheckEvictionBudget(Budget("1"), {400, 512}, limits));
  EXPECT_THAT(CheckEvictionBudget(Budget("1"), {400, 513}, limits),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("hold 513 slots, want at most the 512 "
                                 "positions of the model")));
  ExpectRefused(limits, Budget("449"), 8900, "hold 513 slots");
}

TEST(EvictionLimitsTest, AnInvalidBudgetIsRefused) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const EvictionBudget& wrong :
       {EvictionBudget{}, EvictionBudget{.ratio = nan},
        EvictionBudget{.ratio = -0.5}, EvictionBudget{.ratio = 1.5},
        EvictionBudget{.tokens = 256, .ratio = 0.5}}) {
    ExpectRefused(Limits(), wrong, 100, "want exactly one of them set");
  }
}

TEST(EvictionLimitsTest,
     APageGroupsLeastBudgetIsThatOfTheLayerWithTheMostSinksAndRecentTokens) {
  plan::AttentionShape shape;
  shape.num_heads = shape.num_kv_heads = 2;
  shape.head_dim = shape.rotary_dim = 32;
  shape.layers.resize(3);
  shape.layers[1].sliding_window = 16;
  kvasir::v1::KvPlan plan = plan::FullRankPlan(shape, kvasir::v1::BF16);
  const auto limits_of = [&] {
    return EvictionLimitsOf(plan::ResolvePlan(plan, shape).value());
  };
  EXPECT_FALSE(limits_of().evicts());
  KVASIR_ASSERT_OK(plan::ApplyEviction(
      {.budget = {.tokens = 256}, .sinks = 4, .recent = 32}, shape, &plan));
  plan.mutable_layers(2)->mutable_eviction()->set_recent(50);
  const EvictionLimits limits = limits_of();
  ASSERT_EQ(limits.groups.size(), 2u);
  EXPECT_EQ(limits.groups[0].pages.eviction.budget_tokens, 256);
  EXPECT_EQ(limits.groups[0].least_slots, 54);
  EXPECT_FALSE(limits.groups[1].pages.eviction.evicts());
}

}  // namespace
}  // namespace kvasir::worker
