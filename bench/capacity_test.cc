#include "bench/capacity.h"

#include <algorithm>

#include "base/status_matchers.h"
#include "cache/layout/layout.h"
#include "model/shapes/shape_config.h"
#include "worker/testing/plan_cases.h"

namespace kvasir::worker {
namespace {

using base::StatusIs;
using ::testing::HasSubstr;

// Test fixture for one plan, with pools of a few pages that have 16 slots each.
class CapacityTest : public ::testing::TestWithParam<PlanCase> {
 protected:
  CapacityTest()
      : spec_(model::SpecOfShape(TinyShape()).value()),
        plan_(PlanOf(GetParam(), spec_)) {}

  // Checks that the measured capacity equals the computed one, in a pool with
  // room for `pages` pages and a few bytes more.
  void ExpectReached(int64_t pages, int64_t tokens) {
    KVASIR_ASSERT_OK_AND_ASSIGN(
        const cache::PageLayout layout,
        cache::PageLayout::Create(plan_, model::AttentionShapeOf(spec_),
                                  {.page_tokens = 16}));
    int64_t id_bytes = 0;
    int64_t sequences = pages;
    for (const auto& group : layout.page_groups()) {
      id_bytes += group.page_bytes;
      sequences = std::min(sequences, pages / ((tokens + 15) / 16 +
                                               group.side_pages_per_sequence));
    }
    KVASIR_ASSERT_OK_AND_ASSIGN(
        const Capacity capacity,
        MeasureCapacity(spec_, plan_,
                        {.pool_bytes = pages * id_bytes + 100,
                         .sequence_tokens = tokens,
                         .page_tokens = 16}));
    EXPECT_EQ(capacity.predicted, sequences) << pages << " " << tokens;
    EXPECT_EQ(capacity.reached, sequences) << pages << " " << tokens;
    // An admitted sequence may have no page for its last token.
    const int64_t complete = sequences * capacity.bytes_per_sequence;
    if (tokens % 16 == 1) {
      EXPECT_GE(capacity.held_bytes, complete);
    } else {
      EXPECT_EQ(capacity.held_bytes, complete);
    }
    EXPECT_LE(capacity.held_bytes, capacity.pool_bytes);
    if (sequences == 0) return;
    EXPECT_EQ(capacity.pool_bytes, pages * id_bytes);
    EXPECT_EQ(capacity.kv_bytes_per_token, layout.marginal_bytes_per_token());
  }

  model::DecoderSpec spec_;
  const kvasir::v1::KvPlan plan_;
};

TEST_P(CapacityTest, TheSchedulerRunsAsManySequencesAsTheCacheLayoutPredicts) {
  for (int64_t pages = 1; pages <= 12; ++pages) {
    for (const int64_t tokens : {31, 32, 33}) ExpectReached(pages, tokens);
  }
}

TEST_P(CapacityTest,
       TheSchedulerReachesThePredictionAlsoForLayersWithASlidingWindow) {
  // Skips plans whose first layer stores whole keys and values, because their
  // page groups would have different numbers of pages.
  if (GetParam().first_whole) return;
  spec_.layers[1].sliding_window = 20;
  ExpectReached(8, 32);
  ExpectReached(9, 33);
}

INSTANTIATE_TEST_SUITE_P(Methods, CapacityTest,
                         ::testing::ValuesIn(PlanCases()),
                         [](const auto& parameter) {
                           return parameter.param.name;
                         });

TEST(CapacityRefusalTest, ALengthOfZeroTokensPerSequenceIsRefused) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const model::DecoderSpec spec,
                              model::SpecOfShape(TinyShape()));
  const auto dense =
      plan::FullRankPlan(model::AttentionShapeOf(spec), kvasir::v1::BF16);
  EXPECT_THAT(MeasureCapacity(spec, dense, {.pool_bytes = 1 << 20}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("a sequence must have from 2 to")));
}

// ServePlan relies on parts that only a valid plan has, so the plan must be
// validated before.
TEST(CapacityRefusalTest, AnInvalidPlanIsRefusedBeforeItsPartsAreRead) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const model::DecoderSpec spec,
                              model::SpecOfShape(TinyShape()));
  auto plan =
      plan::FullRankPlan(model::AttentionShapeOf(spec), kvasir::v1::BF16);
  plan.mutable_layers(0)->mutable_value()->clear_parts();
  EXPECT_THAT(
      MeasureCapacity(spec, plan, {.pool_bytes = 1 << 20, .sequence_tokens = 8})
          .status(),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("layer 0")));
}

}  // namespace
}  // namespace kvasir::worker
