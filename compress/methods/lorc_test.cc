#include "compress/methods/lorc.h"

#include <limits>

#include "base/status_matchers.h"
#include "compress/testing/planner_fixture.h"

namespace kvasir::compress {
namespace {

using ::kvasir::base::StatusIs;
using ::kvasir::v1::KvPlan;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

KvPlan Plan(const PlanRequest& request, const LorcOptions& options) {
  const auto plan = PlanLorc(request, options);
  KVASIR_EXPECT_OK(plan);
  return plan.ok() ? *plan : KvPlan{};
}

// The result of LayerRanks for a layer that is not compressed.
constexpr int64_t kWhole = 0;

// Returns the rank of each layer.
std::vector<int64_t> LayerRanks(const KvPlan& plan) {
  std::vector<int64_t> ranks;
  for (const auto& layer : plan.layers()) {
    EXPECT_EQ(layer.key().parts_size(), 1);
    EXPECT_EQ(RanksOf(layer.key().parts(0)), RanksOf(layer.value().parts(0)));
    const auto& groups = layer.key().parts(0).low_rank().groups();
    ranks.push_back(groups.empty() ? kWhole : groups[0].rank());
  }
  return ranks;
}

// Returns a matrix whose singular values are 1, except for the smallest, which
// is 1 / condition.
at::Tensor WithCondition(int64_t rows, int64_t columns, double condition) {
  at::Tensor weight = at::eye(rows, columns);
  weight[rows / 2][rows / 2] = 1 / condition;
  return weight;
}

class LorcTest : public ::testing::Test {
 protected:
  // In each of 3 layers keys and values have 32 numbers each, which gives 192
  // numbers in all.
  PlanRequest request_ = RequestOf(
      {.layers = 3, .heads = 4, .kv_heads = 2, .head_dim = 16, .hidden = 64});
  // The condition numbers of keys and values in each layer. The logarithms of
  // the cumulative products are 4, 3 and 2, so the formula at PlanLorc gives
  // the ranks 32, 16 + d_min / 2 and d_min.
  std::vector<std::pair<double, double>> conditions_ = {
      {10, 1}, {5, 2}, {4, 25}};

  void SetUp() override {
    request_.weights =
        [this](int64_t layer) -> absl::StatusOr<AttentionWeights> {
      const auto [key, value] = conditions_[static_cast<size_t>(layer)];
      return AttentionWeights{.key = WithCondition(32, 64, key),
                              .value = WithCondition(32, 64, value)};
    };
  }
};

TEST_F(LorcTest, TheCumulativeSensitivityIsASumFromTheLastLayerBackwards) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const std::vector<LayerSensitivity> layers,
                              MeasureSensitivity(request_, 10, nullptr));
  ASSERT_EQ(layers.size(), 3u);
  EXPECT_NEAR(layers[1].key_condition, 5, 1e-5);
  EXPECT_NEAR(layers[1].value_condition, 2, 1e-5);
  EXPECT_NEAR(layers[0].cumulative_log, 4, 1e-5);
  EXPECT_NEAR(layers[1].cumulative_log, 3, 1e-5);
  EXPECT_NEAR(layers[2].cumulative_log, 2, 1e-5);
}

TEST_F(LorcTest, TheConditionNumberOfASingularProjectionIsFinite) {
  conditions_[1] = {1e6, 1};  // 1e-6 is near the rounding error of float32

  conditions_[2] = {std::numeric_limits<double>::infinity(), 1};
  KVASIR_ASSERT_OK_AND_ASSIGN(const std::vector<LayerSensitivity> layers,
                              MeasureSensitivity(request_, 10, nullptr));
  EXPECT_NEAR(layers[1].key_condition / 1e6, 1, 1e-5);
  const double greatest = 1 / (64 * std::numeric_limits<double>::epsilon());
  EXPECT_NEAR(layers[2].key_condition / greatest, 1, 1e-9);
}

TEST_F(
    LorcTest,
    RanksFollowEquation13OfThePaperWithTheGreatestMinimumRankWithinTheBudget) {
  // The ranks 32, 16 + d_min / 2 and d_min may sum to 72, so d_min is 16.
  request_.keep = 0.75;
  const KvPlan plan = Plan(request_, {});
  EXPECT_THAT(LayerRanks(plan), ElementsAre(kWhole, 24, 16));
  EXPECT_TRUE(plan.layers(0).key().parts(0).has_full());
  EXPECT_EQ(plan.method(), "lorc");
  EXPECT_EQ(plan.provenance().decomposition(), "svd");
}

TEST_F(LorcTest, TheMinimumRankCanBeGivenInsteadOfABudget) {
  EXPECT_THAT(LayerRanks(Plan(request_, {.min_rank = 16})),
              ElementsAre(kWhole, 24, 16));
}

TEST_F(LorcTest, RanksDoNotDependOnTheBaseOfTheLogarithm) {
  request_.keep = 0.75;
  EXPECT_THAT(LayerRanks(Plan(request_, {.log_base = 2})),
              ElementsAre(kWhole, 24, 16));
}

TEST_F(LorcTest, LayersWithASensitivityAboveTheThresholdAreNotCompressed) {
  request_.keep = 0.75;
  const KvPlan plan = Plan(request_, {.threshold = 3.5});
  EXPECT_THAT(LayerRanks(plan), ElementsAre(kWhole, 24, 16));
  EXPECT_TRUE(plan.layers(0).key().parts(0).has_full());
  EXPECT_EQ(plan.layers(0).key().parts(0).stored(), kvasir::v1::POST_ROPE);
  EXPECT_THAT(LayerRanks(Plan(request_, {.threshold = 2.5})),
              ElementsAre(kWhole, kWhole, 8));
  // With base 2 the logarithms 3 and 4 become 9.97 and 13.3, so the threshold
  // 12 leaves out the same layer.
  EXPECT_THAT(LayerRanks(Plan(request_, {.log_base = 2, .threshold = 12})),
              ElementsAre(kWhole, 24, 16));
}

TEST_F(LorcTest, AGivenNumberOfTheMostSensitiveLayersIsSkipped) {
  request_.keep = 0.75;
  EXPECT_THAT(LayerRanks(Plan(request_, {.skip_layers = 1})),
              ElementsAre(kWhole, 24, 16));
}

TEST_F(LorcTest, UniformRanksTakeTheSameBytesAsProgressiveRanks) {
  request_.keep = 2.0 / 3;
  const KvPlan progressive = Plan(request_, {.skip_layers = 1});
  const KvPlan uniform =
      Plan(request_, {.progressive = false, .skip_layers = 1});
  EXPECT_THAT(LayerRanks(progressive), ElementsAre(kWhole, 24, 8));
  EXPECT_THAT(LayerRanks(uniform), ElementsAre(kWhole, 16, 16));
  EXPECT_EQ(LaidOutBytes(progressive, request_.spec),
            LaidOutBytes(uniform, request_.spec));
}

TEST_F(LorcTest, OnlyTheListedLayersAreCompressed) {
  request_.keep = 0.5;
  EXPECT_THAT(LayerRanks(Plan(request_, {.only_layers = {0}})),
              ElementsAre(16, kWhole, kWhole));
  EXPECT_THAT(LayerRanks(Plan(request_, {.only_layers = {1, 2}})),
              ElementsAre(kWhole, 16, 16));
}

TEST_F(LorcTest, EquallySensitiveLayersGetEqualRanks) {
  conditions_ = {{1, 1}, {1, 1}, {1, 1}};
  EXPECT_THAT(LayerRanks(Plan(request_, {})), ElementsAre(16, 16, 16));
}

TEST_F(LorcTest,
       TheLatentRankOfALayerIsDividedEquallyAmongTensorParallelWorkers) {
  request_.keep = 0.75;
  request_.tp = 2;
  request_.rank_multiple = 4;
  const KvPlan plan = Plan(request_, {});
  EXPECT_THAT(RanksOf(plan.layers(1).key().parts(0)), ElementsAre(12, 12));
  EXPECT_THAT(LayerRanks(plan), ElementsAre(kWhole, 12, 8));
  ExpectEqualRanks(plan, request_.spec);
}

TEST_F(LorcTest, ThePlanLeavesLessThanOneRankStepOfTheBudgetUnused) {
  for (const double keep : {0.6, 0.71, 0.85, 1.0}) {
    for (const bool progressive : {true, false}) {
      request_.keep = keep;
      request_.rank_multiple = 2;
      const KvPlan plan = Plan(request_, {.progressive = progressive});
      const auto kept = static_cast<double>(KeptBy(plan, request_.spec));
      EXPECT_LE(kept, 192 * keep + 1e-6);
      EXPECT_GT(kept + 2 * 2, 192 * keep);
      EXPECT_EQ(LaidOutBytes(plan, request_.spec), 2 * kept);
      EXPECT_EQ(plan.target().kv_bytes_per_token(), 2 * kept);
    }
  }
}

TEST_F(LorcTest, KeysWithPartialRopeAreStoredInOneLatent) {
  request_.spec.rope.rotary_dim = 8;
  const KvPlan plan = Plan(request_, {.min_rank = 8});
  const auto& key = plan.layers(1).key();
  ASSERT_EQ(key.parts_size(), 1);
  EXPECT_EQ(key.parts(0).stored(), kvasir::v1::PRE_ROPE);
  EXPECT_TRUE(key.parts(0).uses(0).has_reconstruct());
}

TEST_F(LorcTest, InvalidRequestsAreRefused) {
  const auto invalid = [](const char* text) {
    return StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text));
  };
  request_.keep = 0.5;
  EXPECT_THAT(PlanLorc(request_, {}),
              invalid("the compressed layers keep 112 numbers per token"));
  request_.keep = 0.75;
  EXPECT_THAT(PlanLorc(request_, {.threshold = 1, .skip_layers = 1}),
              invalid("give only one of"));
  EXPECT_THAT(PlanLorc(request_, {.skip_layers = 3}), invalid("must be 0..2"));
  EXPECT_THAT(PlanLorc(request_, {.only_layers = {3}}),
              invalid("must be 0..2, but layer 3 is listed"));
  EXPECT_THAT(PlanLorc(request_, {.log_base = 1}),
              invalid("finite and above 1"));
  for (const double threshold : {0.0, -1.0, 1.5}) {
    EXPECT_THAT(PlanLorc(request_, {.threshold = threshold}),
                invalid("no layer would be compressed"));
  }
  for (const double threshold :
       {std::nan(""), std::numeric_limits<double>::infinity()}) {
    EXPECT_THAT(PlanLorc(request_, {.threshold = threshold}),
                invalid("threshold must be finite"));
  }
  // The threshold leaves out two of three layers, and these two already take
  // more than half of the numbers.
  request_.keep = 0.5;
  EXPECT_THAT(PlanLorc(request_, {.threshold = 2.5}), invalid("skip fewer"));
  request_.keep = 0.75;
  EXPECT_THAT(PlanLorc(request_, {.min_rank = 33}), invalid("1..32, is 33"));
  conditions_[1].second = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(PlanLorc(request_, {}), invalid("layer 1 value: projection"));
  request_.weights = nullptr;
  EXPECT_THAT(PlanLorc(request_, {}),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("without the model's weights")));
  request_.weights = [](int64_t) -> absl::StatusOr<AttentionWeights> {
    return absl::NotFoundError("no such tensor");
  };
  EXPECT_THAT(PlanLorc(request_, {}),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("no such")));
}

}  // namespace
}  // namespace kvasir::compress
