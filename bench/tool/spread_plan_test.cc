#include "bench/tool/spread_plan.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "cache/layout/layout.h"
#include "plan/plan.h"

namespace kvasir::cli {
namespace {

using ::kvasir::base::StatusIs;

// The parts of a plan with two layers of three heads with 16 dimensions.
constexpr char kKey[] = R"({"parts": [{"rope_low_rank": {"groups": [
    {"heads": [0], "pairs": [1, 0, 2, 3, 4, 5, 6, 7],
     "rank_per_pair": [1, 1, 1, 1, 1, 1, 1, 1]},
    {"heads": [1], "pairs": [2, 0, 1, 3, 4, 5, 6, 7],
     "rank_per_pair": [1, 1, 1, 1, 1, 1, 1, 1]},
    {"heads": [2], "pairs": [3, 0, 1, 2, 4, 5, 6, 7],
     "rank_per_pair": [1, 1, 1, 1, 1, 1, 1, 1]}]},
  "uses": [{"at_runtime": {}}], "stored": "POST_ROPE",
  "codec": {"bits": {"runs": [{"channels": 8, "bits": 5},
                              {"channels": 8, "bits": 2}]},
            "channel_static": {}, "none": {}}}]})";
std::string ValuesOf(const std::string& groups, const std::string& runs) {
  return absl::StrCat(R"({"parts": [{"low_rank": {"groups": [)", groups,
                      R"(]}, "uses": [{"at_runtime": {}}],
      "stored": "NO_ROPE", "codec": {"bits": {"runs": [)",
                      runs, R"(]}, "channel_static": {}, "none": {}}}]})");
}
kvasir::v1::KvPlan PlanWith(const std::string& first,
                            const std::string& second) {
  const auto layer = [](const std::string& values) {
    return absl::StrCat(R"({"key": )", kKey, R"(, "value": )", values,
                        R"(, "exact_sinks": 4})");
  };
  const std::string text =
      absl::StrCat(R"({"schema_version": 1, "layers": [)", layer(first), ", ",
                   layer(second), "]}");
  return plan::ParsePlanJson(text, "test").value();
}
const std::string kAllHeads =
    ValuesOf(R"({"heads": [0, 1, 2], "rank": 48})",
             R"({"channels": 8, "bits": 6}, {"channels": 24, "bits": 3},
                {"channels": 16})");
const std::string kPerHead = ValuesOf(
    R"({"heads": [0], "rank": 16}, {"heads": [1], "rank": 16},
       {"heads": [2], "rank": 16})",
    R"({"channels": 8, "bits": 4}, {"channels": 8, "bits": 3})");

plan::AttentionShape ShapeOf(int64_t layers, int64_t heads) {
  plan::AttentionShape shape;
  shape.num_kv_heads = heads;
  shape.num_heads = 2 * heads;
  shape.head_dim = 16;
  shape.rotary_dim = 16;
  shape.hidden_size = 64;
  shape.layers.resize(static_cast<size_t>(layers));
  return shape;
}

TEST(SpreadPlanTest, SpreadingAPlanToItsOwnModelShapeDoesNotChangeIt) {
  const auto plan = PlanWith(kAllHeads, kPerHead);
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto spread,
                              SpreadPlan(plan, ShapeOf(2, 3)));
  EXPECT_EQ(spread.SerializeAsString(), plan.SerializeAsString());
}

TEST(SpreadPlanTest, APlanSpreadToAnotherModelShapeHasTheSameHistogramOfBits) {
  const auto plan = PlanWith(kAllHeads, kPerHead);
  const plan::AttentionShape shape = ShapeOf(4, 6);
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto spread, SpreadPlan(plan, shape));
  ASSERT_EQ(spread.layers_size(), 4);
  const auto& all = spread.layers(1).value().parts(0);
  ASSERT_EQ(all.low_rank().groups_size(), 1);
  EXPECT_EQ(all.low_rank().groups(0).heads_size(), 6);
  EXPECT_EQ(all.low_rank().groups(0).rank(), 96);
  EXPECT_EQ(all.codec().bits().runs(0).channels(), 16);
  EXPECT_EQ(all.codec().bits().runs(1).channels(), 48);
  EXPECT_EQ(all.codec().bits().runs(2).channels(), 32);
  const auto& own = spread.layers(2).value().parts(0);
  ASSERT_EQ(own.low_rank().groups_size(), 6);
  EXPECT_EQ(own.low_rank().groups(5).heads(0), 5);
  EXPECT_EQ(own.codec().bits().runs(0).channels(), 8);
  // With four times as many heads, a head must take as many bytes as before.
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const auto before,
      cache::PageLayout::Create(plan, ShapeOf(2, 3), {.page_tokens = 64}));
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const auto after,
      cache::PageLayout::Create(spread, shape, {.page_tokens = 64}));
  for (const plan::Side side : {plan::Side::kKey, plan::Side::kValue}) {
    EXPECT_EQ(after.PayloadBytesPerToken(1, side),
              2 * before.PayloadBytesPerToken(0, side));
  }
}

// The plan's key group has three heads and three channels of each pair, so one
// channel of each pair per head.
TEST(SpreadPlanTest, AKeyGroupOfAllHeadsKeepsItsNumberOfChannelsPerHead) {
  kvasir::v1::KvPlan plan = PlanWith(kAllHeads, kAllHeads);
  for (auto& layer : *plan.mutable_layers()) {
    kvasir::v1::Part* key = layer.mutable_key()->mutable_parts(0);
    auto* group = key->mutable_rope_low_rank()->mutable_groups(0);
    key->mutable_rope_low_rank()->mutable_groups()->DeleteSubrange(1, 2);
    *group = {};
    for (uint32_t head = 0; head < 3; ++head) {
      group->add_heads(head);
      for (uint32_t pair = 0; pair < 8; ++pair) {
        group->add_pairs((pair + head) % 8);
        group->add_rank_per_pair(1);
      }
    }
    for (auto& run : *key->mutable_codec()->mutable_bits()->mutable_runs()) {
      run.set_channels(24);
    }
  }
  for (const int64_t heads : {2, 4, 6}) {
    const plan::AttentionShape shape = ShapeOf(2, heads);
    KVASIR_ASSERT_OK_AND_ASSIGN(const auto spread, SpreadPlan(plan, shape));
    const auto& group =
        spread.layers(0).key().parts(0).rope_low_rank().groups(0);
    EXPECT_EQ(group.heads_size(), heads);
    for (uint32_t pair = 0; pair < 8; ++pair) {
      EXPECT_EQ(std::count(group.pairs().begin(), group.pairs().end(), pair),
                heads);
    }
    KVASIR_ASSERT_OK_AND_ASSIGN(
        const auto layout,
        cache::PageLayout::Create(spread, shape, {.page_tokens = 64}));
    EXPECT_EQ(layout.PayloadBytesPerToken(0, plan::Side::kKey),
              static_cast<double>(heads * 16 * (5 + 2) / 2) / 8);
  }
}

TEST(SpreadPlanTest, PlansWithGroupsOfSeveralButNotAllHeadsCannotBeSpread) {
  const std::string some =
      ValuesOf(R"({"heads": [0], "rank": 16}, {"heads": [1, 2], "rank": 16})",
               R"({"channels": 16, "bits": 4})");
  EXPECT_THAT(SpreadPlan(PlanWith(some, some), ShapeOf(2, 4)),
              StatusIs(absl::StatusCode::kUnimplemented,
                       testing::HasSubstr(
                           "each of its groups has one head or all heads")));
}

// A plan from a file has not been validated yet, so SpreadPlan must find these
// errors.
TEST(SpreadPlanTest, GroupsWithoutARankAndRunsWiderThanTheirGroupAreRefused) {
  const auto refusal = [](const std::string& groups, const std::string& runs) {
    const std::string values = ValuesOf(groups, runs);
    return SpreadPlan(PlanWith(values, values), ShapeOf(2, 4)).status();
  };
  const std::string run = R"({"channels": 16, "bits": 4})";
  for (const std::string groups :
       {R"({"heads": [0, 1]})", R"({}, {"heads": [0, 1], "rank": 16})"}) {
    EXPECT_THAT(refusal(groups, run),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         testing::HasSubstr("heads must be from 1 to")));
  }
  EXPECT_THAT(
      refusal(R"({"heads": [0, 1, 2], "rank": 16})",
              R"({"channels": 4294967295, "bits": 4})"),
      StatusIs(absl::StatusCode::kInvalidArgument,
               testing::HasSubstr("runs of at least 4294967295 channels "
                                  "in all for a latent of 16 channels")));
}

// Regression test: the ends of runs are products of ranks, which overflowed for
// ranks of 2^32 - 1.
TEST(SpreadPlanTest, AGroupWhoseRankExceedsTheDimensionsOfItsHeadsIsRefused) {
  const std::string values =
      ValuesOf(R"({"heads": [0, 1, 2], "rank": 4294967295})",
               R"({"channels": 4294967295, "bits": 4})");
  EXPECT_THAT(
      SpreadPlan(PlanWith(values, values), ShapeOf(2, 4)),
      StatusIs(absl::StatusCode::kInvalidArgument,
               testing::HasSubstr("a group of 3 heads must be from 1 to "
                                  "48, not 4294967295")));
}

}  // namespace
}  // namespace kvasir::cli
