#include "plan/eviction.h"

#include "base/status_matchers.h"
#include "plan/plan.h"
#include "plan/resolved_plan.h"

namespace kvasir::plan {
namespace {

using base::StatusIs;
using ::testing::HasSubstr;

AttentionShape Shape(int64_t layers) {
  AttentionShape shape;
  shape.num_heads = shape.num_kv_heads = 4;
  shape.head_dim = 64;
  shape.rotary_dim = 64;
  shape.layers.resize(static_cast<size_t>(layers));
  return shape;
}

TEST(EvictionTest, EvictionMethodsAreFoundByName) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const EvictionMethod h2o,
                              ParseEvictionMethod("h2o"));
  EXPECT_EQ(h2o, EvictionMethod::kH2o);
  EXPECT_THAT(ParseEvictionMethod("lru"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("want q-hitter, h2o or streaming")));
}

TEST(EvictionTest,
     ApplyEvictionSetsAndReplacesTheEvictionOfLayersWithoutAWindow) {
  AttentionShape shape = Shape(3);
  shape.layers[1].sliding_window = 32;
  kvasir::v1::KvPlan plan = FullRankPlan(shape, kvasir::v1::BF16);
  KVASIR_ASSERT_OK(ApplyEviction({}, shape, &plan));
  KVASIR_ASSERT_OK_AND_ASSIGN(const ResolvedPlan resolved,
                              ResolvePlan(plan, shape));
  EXPECT_FALSE(resolved.layer(1).eviction.has_value());
  EXPECT_EQ(resolved.page_groups[0].eviction,
            (EvictionCounts{
                .budget_ratio = 0.2, .least_tokens = 68, .every_tokens = 128}));
  EXPECT_EQ(resolved.layer(2).eviction->lambda, 1.0F);
  EXPECT_TRUE(resolved.layer(2).eviction->scored);

  KVASIR_ASSERT_OK(ApplyEviction({.lambda = 0.5}, shape, &plan));
  EXPECT_EQ(plan.layers(2).eviction().lambda(), 0.5);

  // A second call replaces the eviction of the first one.
  KVASIR_ASSERT_OK(ApplyEviction({.method = EvictionMethod::kStreaming,
                                  .budget = {.tokens = 256},
                                  .every_tokens = 16},
                                 shape, &plan));
  KVASIR_ASSERT_OK_AND_ASSIGN(const ResolvedPlan streaming,
                              ResolvePlan(plan, shape));
  EXPECT_EQ(streaming.page_groups[0].eviction,
            (EvictionCounts{.budget_tokens = 256, .every_tokens = 16}));
  EXPECT_EQ(streaming.layer(0).eviction->recent, 64);
  EXPECT_FALSE(streaming.layer(0).eviction->scored);
}

// Tokens that are stored exactly must not be evicted, because their place in
// the cache follows from their position.
TEST(EvictionTest, EvictionKeepsTheTokensThatThePlanStoresExactly) {
  const AttentionShape shape = Shape(1);
  kvasir::v1::KvPlan plan = FullRankPlan(shape, kvasir::v1::BF16);
  auto* codec =
      plan.mutable_layers(0)->mutable_key()->mutable_parts(0)->mutable_codec();
  codec->mutable_bits()->add_schedule(4);
  codec->mutable_per_token();
  codec->set_param_dtype(kvasir::v1::F16);
  ASSERT_TRUE(SetExactTokens({.sinks = 8, .window = 128}, &plan));
  KVASIR_ASSERT_OK(
      ApplyEviction({.method = EvictionMethod::kH2o}, shape, &plan));
  KVASIR_ASSERT_OK_AND_ASSIGN(const ResolvedPlan resolved,
                              ResolvePlan(plan, shape));
  EXPECT_EQ(resolved.layer(0).eviction->recent, 128);
  EXPECT_EQ(resolved.layer(0).eviction->sinks, 8);
  EXPECT_EQ(resolved.layer(0).eviction->lambda, 1.0F);
  // The number of recent tokens is not raised to the exact window if it was
  // set explicitly.
  KVASIR_ASSERT_OK(ApplyEviction({.recent = 64}, shape, &plan));
  EXPECT_THAT(
      ValidatePlan(plan, shape),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("exact_window of 128 tokens, but recent is only 64")));
}

TEST(EvictionTest, EvictionIsRefusedForAModelWhoseLayersAllHaveSlidingWindows) {
  AttentionShape shape = Shape(1);
  shape.layers[0].sliding_window = 32;
  kvasir::v1::KvPlan plan = FullRankPlan(shape, kvasir::v1::BF16);
  EXPECT_THAT(ApplyEviction({}, shape, &plan),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("no layer can evict")));
}

}  // namespace
}  // namespace kvasir::plan
