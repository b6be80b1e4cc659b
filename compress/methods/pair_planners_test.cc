// Tests the planners that work on RoPE pairs (RAP and commuting): their
// budgets, their choices, and the attention of the applied plans.
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/status_matchers.h"
#include "cache/layout/layout.h"
#include "compress/methods/commuting.h"
#include "compress/methods/rap.h"
#include "compress/methods/rope_factors.h"
#include "compress/methods/rope_pairs.h"
#include "compress/testing/planner_fixture.h"
#include "compress/testing/tiny_attention.h"
#include "model/shapes/attention_shape.h"
#include "plan/plan.h"

namespace kvasir::compress {
namespace {

using ::kvasir::base::StatusIs;
using kvasir::v1::KvPlan;
using kvasir::v1::Part;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr double kTolerance = 1e-5;

// Returns how many numbers a token's keys or values have under the plan.
int64_t Numbers(const KvPlan& plan, const model::DecoderSpec& spec,
                plan::Side side) {
  int64_t numbers = 0;
  for (const auto& layer : plan.layers()) {
    const auto& parts =
        side == plan::Side::kKey ? layer.key().parts() : layer.value().parts();
    for (const Part& part : parts) {
      if (part.has_full()) numbers += spec.num_kv_heads * spec.head_dim;
      for (const auto& group : part.low_rank().groups()) {
        numbers += group.rank();
      }
      for (const auto& head : part.rope_pairs().per_head()) {
        numbers += 2 * head.pair_indices_size();
      }
      for (const auto& group : part.rope_low_rank().groups()) {
        for (const uint32_t rank : group.rank_per_pair()) numbers += 2 * rank;
      }
    }
  }
  return numbers;
}

int64_t Numbers(const KvPlan& plan, const model::DecoderSpec& spec) {
  return Numbers(plan, spec, plan::Side::kKey) +
         Numbers(plan, spec, plan::Side::kValue);
}

int64_t DenseSide(const model::DecoderSpec& spec) {
  return spec.num_layers() * spec.num_kv_heads * spec.head_dim;
}

// Checks that the plan is valid and that its kv_bytes_per_token are those of
// its page layout.
void ExpectPlanStands(const PlanRequest& request, const KvPlan& plan) {
  const plan::AttentionShape shape = model::AttentionShapeOf(request.spec);
  KVASIR_EXPECT_OK(plan::ValidatePlan(plan, shape));
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto layout,
                              cache::PageLayout::Create(plan, shape, {}));
  EXPECT_EQ(plan.target().kv_bytes_per_token(),
            layout.marginal_payload_bytes_per_token());
  // In these plans each number takes four bytes.
  EXPECT_EQ(plan.target().kv_bytes_per_token(),
            4.0 * static_cast<double>(Numbers(plan, request.spec)));
}

at::Tensor AttendPlanned(const TinyLayers& tiny, const KvPlan& plan,
                         int64_t layer) {
  auto tensors = ApplyLayerPlan(TinyApplyRequest(tiny, plan, layer));
  KVASIR_EXPECT_OK(tensors);
  if (!tensors.ok()) return {};
  return AttendCompressed(tiny, plan, *tensors, layer);
}

std::vector<int64_t> PairsOfHead(const Part& part, int head) {
  const auto& pairs = part.rope_pairs().per_head(head).pair_indices();
  return {pairs.begin(), pairs.end()};
}

struct ShapeCase {
  const char* name;
  TinyShape shape;
};
class PairsPlanTest : public ::testing::TestWithParam<ShapeCase> {
 protected:
  const TinyLayers tiny_ = MakeTinyLayers(GetParam().shape, 17);
};
INSTANTIATE_TEST_SUITE_P(
    Shapes, PairsPlanTest,
    ::testing::Values(ShapeCase{"GroupedHalfSplit", {.num_layers = 2}},
                      ShapeCase{"MultiHeadInterleavedBiased",
                                {.num_layers = 2,
                                 .num_kv_heads = 4,
                                 .pairing = model::RopePairing::kInterleaved,
                                 .qkv_bias = true}},
                      ShapeCase{
                          "PartialRotary",
                          {.num_layers = 2, .rotary_dim = 4, .qkv_bias = true}},
                      ShapeCase{"NoRope", {.num_layers = 2, .rotary_dim = 0}}),
    [](const auto& test) { return test.param.name; });

TEST_P(PairsPlanTest, APlanThatKeepsEverythingGivesTheBaseModelsAttention) {
  const PlanRequest request = TinyPlanRequest(tiny_, 1.0);
  for (const BudgetScore score : {BudgetScore::kUniform, BudgetScore::kFisher,
                                  BudgetScore::kFisherRoot}) {
    RapOptions rap;
    rap.budget.score = score;
    CommutingOptions commuting;
    commuting.budget.score = score;
    for (const auto& plan :
         {PlanRap(request, rap), PlanCommuting(request, commuting)}) {
      KVASIR_ASSERT_OK(plan);
      ExpectPlanStands(request, *plan);
      for (int64_t layer = 0; layer < 2; ++layer) {
        EXPECT_LT(RelativeError(AttendPlanned(tiny_, *plan, layer),
                                AttendWhole(tiny_, layer)),
                  kTolerance);
      }
    }
  }
}

void ExpectBudgetMet(const PlanRequest& request,
                     const absl::StatusOr<KvPlan>& plan, int64_t target) {
  KVASIR_ASSERT_OK(plan);
  ExpectPlanStands(request, *plan);
  EXPECT_LE(Numbers(*plan, request.spec), target);
  // The plan may miss the target by one step of keys and one step of values,
  // because keys and values are rounded separately.
  EXPECT_GT(Numbers(*plan, request.spec),
            target - 3 * request.spec.num_kv_heads);
}

TEST_P(PairsPlanTest, TheBudgetIsMetUpToOneStepOfKeysAndOneOfValues) {
  for (const double keep : {0.75, 0.6, 0.5}) {
    const PlanRequest request = TinyPlanRequest(tiny_, keep);
    const auto target = static_cast<int64_t>(
        std::floor(keep * 2.0 * static_cast<double>(DenseSide(tiny_.spec))));
    for (const BudgetScore score :
         {BudgetScore::kUniform, BudgetScore::kFisherRoot,
          BudgetScore::kEnergy}) {
      RapOptions rap;
      rap.budget.score = score;
      CommutingOptions commuting;
      commuting.budget.score = score;
      ExpectBudgetMet(request, PlanCommuting(request, commuting), target);
      // RAP does not support kEnergy
      if (score == BudgetScore::kEnergy) continue;
      ExpectBudgetMet(request, PlanRap(request, rap), target);
    }
  }
}

TEST_P(PairsPlanTest, IfValuesStayWholeOnlyKeysAreReduced) {
  PlanRequest request = TinyPlanRequest(tiny_, 0.9);
  RapOptions rap;
  rap.budget.keep_values = true;
  CommutingOptions commuting;
  commuting.budget.keep_values = true;
  const int64_t side = DenseSide(tiny_.spec);
  for (const double key_keep : {0.75, 0.5}) {
    request.keep = (1 + key_keep) / 2;
    for (const auto& plan :
         {PlanRap(request, rap), PlanCommuting(request, commuting)}) {
      KVASIR_ASSERT_OK(plan);
      EXPECT_EQ(Numbers(*plan, tiny_.spec, plan::Side::kValue), side);
      const int64_t keys = Numbers(*plan, tiny_.spec, plan::Side::kKey);
      const double want = key_keep * static_cast<double>(side);
      EXPECT_LE(static_cast<double>(keys), want);
      EXPECT_GT(static_cast<double>(keys),
                want - 2.0 * static_cast<double>(tiny_.spec.num_kv_heads));
      for (const auto& layer : plan->layers()) {
        EXPECT_TRUE(layer.value().parts(0).has_full());
      }
    }
  }
}

TEST_P(PairsPlanTest, WithAGivenShareOfKeysTheRestOfTheBudgetGoesToValues) {
  const PlanRequest request = TinyPlanRequest(tiny_, 0.625);
  const int64_t side = DenseSide(tiny_.spec);
  RapOptions rap;
  rap.budget.key_keep = 0.5;
  CommutingOptions commuting;
  commuting.budget.key_keep = 0.5;
  for (const auto& plan :
       {PlanRap(request, rap), PlanCommuting(request, commuting)}) {
    KVASIR_ASSERT_OK(plan);
    EXPECT_EQ(Numbers(*plan, tiny_.spec, plan::Side::kKey), side / 2);
    EXPECT_EQ(Numbers(*plan, tiny_.spec, plan::Side::kValue), side * 3 / 4);
  }
}

std::vector<int64_t> LatentWidths(const Part& part) {
  std::vector<int64_t> widths;
  if (part.has_full()) widths.assign(4, 24);
  for (const auto& group : part.low_rank().groups()) {
    widths.push_back(group.rank());
  }
  for (const auto& head : part.rope_pairs().per_head()) {
    widths.push_back(2 * head.pair_indices_size());
  }
  for (const auto& group : part.rope_low_rank().groups()) {
    widths.push_back(2 * std::accumulate(group.rank_per_pair().begin(),
                                         group.rank_per_pair().end(), 0));
  }
  return widths;
}

// The models have 4 KV heads of 24 dims in two layers.
TEST(PairsBudgetTest,
     TheBudgetIsMetForEveryRankMultipleTensorParallelSizeAndCodec) {
  const TinyLayers tiny = MakeTinyLayers({.num_layers = 2,
                                          .hidden_size = 64,
                                          .num_kv_heads = 4,
                                          .head_dim = 24,
                                          .rotary_dim = 24},
                                         47);
  for (const int64_t tp : {1, 2}) {
    for (const int64_t multiple : {3, 8}) {
      for (const bool codes : {false, true}) {
        PlanRequest request = TinyPlanRequest(tiny, 0.6);
        request.tp = tp;
        request.rank_multiple = multiple;
        if (codes) request.key_codec = request.value_codec = BitsCodec(8);
        const int64_t even = multiple % 2 == 0 ? multiple : 2 * multiple;
        const double target =
            0.6 * 2 * static_cast<double>(DenseSide(tiny.spec));
        for (const auto& plan : {PlanRap(request, {}),
                                 PlanCommuting(request, {.group_heads = 2})}) {
          KVASIR_ASSERT_OK(plan);
          const auto kept = static_cast<double>(Numbers(*plan, tiny.spec));
          EXPECT_LE(kept, target);
          EXPECT_GT(kept + static_cast<double>(4 * (even + multiple)), target);
          int64_t latents = 0;
          for (const auto& layer : plan->layers()) {
            for (const Part* part :
                 {&layer.key().parts(0), &layer.value().parts(0)}) {
              const int64_t step = part->has_low_rank() ? multiple : even;
              for (const int64_t width : LatentWidths(*part)) {
                EXPECT_TRUE(width % step == 0 || width % 24 == 0) << width;
                ++latents;
              }
            }
          }
          // A coded latent takes one byte per code and two float16. Without
          // codes, a number takes four bytes.
          const double want =
              codes ? kept + 4.0 * static_cast<double>(latents) : 4.0 * kept;
          EXPECT_EQ(LaidOutBytes(*plan, tiny.spec), want);
          EXPECT_EQ(plan->target().kv_bytes_per_token(), want);
          if (tp > 1) ExpectEqualRanks(*plan, tiny.spec);
        }
      }
    }
  }
}

// ------------------------------------------------------------------------ RAP

// One layer with two KV heads of four RoPE pairs, and Fisher information that
// is set by hand.
class RapTest : public ::testing::Test {
 protected:
  RapTest() {
    const at::Tensor fisher = at::zeros({2, 8}, at::kDouble);
    // RoPE is half-split, so pair f has the dims f and f + 4.
    const double scores[2][4] = {{4, 1, 3, 2}, {1, 2, 8, 3}};
    for (int64_t head = 0; head < 2; ++head) {
      for (int64_t pair = 0; pair < 4; ++pair) {
        fisher[head][pair] = 0.25 * scores[head][pair];
        fisher[head][pair + 4] = 0.75 * scores[head][pair];
      }
    }
    tiny_.calibration.layers[0].key_fisher = fisher.flatten();
    tiny_.calibration.layers[0].value_fisher = at::full({16}, 4.5, at::kDouble);
    options_.budget.score = BudgetScore::kFisher;
  }

  TinyLayers tiny_ = MakeTinyLayers({}, 3);
  RapOptions options_;
};

TEST_F(RapTest, EveryHeadKeepsTheSameNumberOfItsOwnBestPairs) {
  options_.budget.keep_values = true;
  KVASIR_ASSERT_OK_AND_ASSIGN(const KvPlan plan,
                              PlanRap(TinyPlanRequest(tiny_, 0.75), options_));
  const Part& keys = plan.layers(0).key().parts(0);
  EXPECT_THAT(PairsOfHead(keys, 0), ElementsAre(0, 2));
  EXPECT_THAT(PairsOfHead(keys, 1), ElementsAre(2, 3));
  EXPECT_EQ(plan.method(), "rap");
  EXPECT_EQ(keys.stored(), kvasir::v1::POST_ROPE);
  EXPECT_TRUE(keys.uses(0).has_fold());
}

TEST_F(RapTest,
       KeysAndValuesShareOneBudgetInProportionToTheirFisherInformation) {
  // The scores of keys sum to 24 and the scores of values to 72. So of the 16
  // kept numbers, keys get 4 and values get 12.
  KVASIR_ASSERT_OK_AND_ASSIGN(const KvPlan plan,
                              PlanRap(TinyPlanRequest(tiny_, 0.5), options_));
  EXPECT_EQ(Numbers(plan, tiny_.spec, plan::Side::kKey), 4);
  EXPECT_EQ(Numbers(plan, tiny_.spec, plan::Side::kValue), 12);
  EXPECT_EQ(plan.layers(0).value().parts(0).low_rank().groups_size(), 2);
}

TEST_F(RapTest, WithAUniformBudgetKeysAndValuesKeepTheSameShare) {
  options_.budget.score = BudgetScore::kUniform;
  KVASIR_ASSERT_OK_AND_ASSIGN(const KvPlan plan,
                              PlanRap(TinyPlanRequest(tiny_, 0.5), options_));
  EXPECT_EQ(Numbers(plan, tiny_.spec, plan::Side::kKey), 8);
  EXPECT_EQ(Numbers(plan, tiny_.spec, plan::Side::kValue), 8);
}

TEST_F(RapTest, TheNumberOfKeptDimsIsAMultipleOfTheRankMultiple) {
  PlanRequest request = TinyPlanRequest(tiny_, 0.6);
  request.rank_multiple = 4;
  KVASIR_ASSERT_OK_AND_ASSIGN(const KvPlan plan, PlanRap(request, options_));
  EXPECT_EQ(PairsOfHead(plan.layers(0).key().parts(0), 0).size() % 2, 0);
  for (const auto& group :
       plan.layers(0).value().parts(0).low_rank().groups()) {
    EXPECT_EQ(group.rank() % 4, 0);
  }
}

TEST_F(RapTest, TheMagnitudeScoreOfARopePairIsItsMeanSquaredLength) {
  options_.pair_score = PairScore::kMagnitude;
  options_.budget.score = BudgetScore::kUniform;
  options_.budget.keep_values = true;
  KVASIR_ASSERT_OK_AND_ASSIGN(const KvPlan plan,
                              PlanRap(TinyPlanRequest(tiny_, 0.625), options_));
  const at::Tensor energy =
      tiny_.inputs.mm(tiny_.weights[0].key.to(at::kDouble).t())
          .square()
          .mean(0)
          .view({2, 2, 4})
          .sum(1);
  for (int head = 0; head < 2; ++head) {
    EXPECT_THAT(PairsOfHead(plan.layers(0).key().parts(0), head),
                ElementsAre(energy[head].argmax().item<int64_t>()));
  }
}

TEST_F(RapTest, ValuesThatKeepAllDimsAreStoredWhole) {
  tiny_.calibration.layers[0].value_fisher = at::full({16}, 1e3, at::kDouble);
  KVASIR_ASSERT_OK_AND_ASSIGN(const KvPlan plan,
                              PlanRap(TinyPlanRequest(tiny_, 0.75), options_));
  EXPECT_TRUE(plan.layers(0).value().parts(0).has_full());
  EXPECT_EQ(Numbers(plan, tiny_.spec, plan::Side::kKey), 8);
}

TEST_F(RapTest, InvalidRequestsAreRefusedWithTheReason) {
  const auto plan = [&](double keep) {
    return PlanRap(TinyPlanRequest(tiny_, keep), options_).status();
  };
  using absl::StatusCode;
  EXPECT_THAT(plan(0.0),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("above 0")));
  EXPECT_THAT(plan(0.05), StatusIs(StatusCode::kInvalidArgument,
                                   HasSubstr("keys and values")));
  options_.budget.keep_values = true;
  EXPECT_THAT(plan(0.5), StatusIs(StatusCode::kInvalidArgument,
                                  HasSubstr("nothing for the keys")));
  options_.budget.key_keep = 0.5;
  EXPECT_THAT(plan(0.75),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("cannot be used with --keep-values")));
  options_.budget.keep_values = false;
  options_.budget.key_keep = 1.0;
  EXPECT_THAT(plan(0.5), StatusIs(StatusCode::kInvalidArgument,
                                  HasSubstr("nothing for the values")));
  options_.budget.key_keep = 1.5;
  EXPECT_THAT(plan(0.5), StatusIs(StatusCode::kInvalidArgument,
                                  HasSubstr("kept share of keys")));
  options_.budget.key_keep.reset();
  options_.budget.score = BudgetScore::kEnergy;
  EXPECT_THAT(plan(0.5), StatusIs(StatusCode::kInvalidArgument,
                                  HasSubstr("want uniform, fisher or fisher-"
                                            "root")));
  options_.budget.score = BudgetScore::kFisher;
  PlanRequest split = TinyPlanRequest(tiny_, 0.5);
  split.tp = 3;
  EXPECT_THAT(PlanRap(split, options_),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("3")));
  tiny_.calibration.layers[0].key_fisher[3] =
      std::numeric_limits<double>::quiet_NaN();
  options_.budget.score = BudgetScore::kUniform;
  EXPECT_THAT(plan(0.5), StatusIs(StatusCode::kInvalidArgument,
                                  HasSubstr("layer 0 key head 0 dim 3")));
  tiny_.calibration.layers[0].key_fisher = at::Tensor();
  EXPECT_THAT(plan(0.5), StatusIs(StatusCode::kFailedPrecondition,
                                  HasSubstr("\"magnitude\" does not need it")));
  PlanRequest alone = TinyPlanRequest(tiny_, 0.5);
  options_.pair_score = PairScore::kMagnitude;
  alone.weights = nullptr;
  EXPECT_THAT(PlanRap(alone, options_),
              StatusIs(StatusCode::kFailedPrecondition,
                       HasSubstr("needs the model's weights")));
  alone.calibration = nullptr;
  EXPECT_THAT(PlanRap(alone, options_),
              StatusIs(StatusCode::kFailedPrecondition,
                       HasSubstr("needs a calibration")));
}

TEST_F(RapTest, NaNWeightsAreRefused) {
  tiny_.weights[0].key[1][1] = std::numeric_limits<float>::quiet_NaN();
  options_.pair_score = PairScore::kMagnitude;
  EXPECT_THAT(PlanRap(TinyPlanRequest(tiny_, 0.5), options_),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("layer 0 key head 0")));
  EXPECT_THAT(
      PlanCommuting(TinyPlanRequest(tiny_, 0.5), {}),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("layer 0")));
}

// ------------------------------------------------------------------ commuting

// Returns options that keep whole values, and as much of the keys as the
// request's `keep` allows.
CommutingOptions KeysOnly(int64_t group_heads) {
  CommutingOptions options;
  options.group_heads = group_heads;
  options.budget.keep_values = true;
  return options;
}
PlanRequest KeysRequest(const TinyLayers& tiny, double key_keep) {
  return TinyPlanRequest(tiny, (1 + key_keep) / 2);
}

// Returns the keys of all tokens at a RoPE pair as complex numbers, [T, Hkv].
at::Tensor ComplexKeys(const TinyLayers& tiny, int64_t pair) {
  const at::Tensor keys =
      tiny.inputs.mm(tiny.weights[0].key.to(at::kDouble).t())
          .view({-1, tiny.spec.num_kv_heads, tiny.spec.head_dim});
  const PairDims dims = DimsOfPair(tiny.spec.rope, pair);
  return at::complex(keys.select(2, dims.first).contiguous(),
                     keys.select(2, dims.second).contiguous());
}

// Returns the weighted energy of the error in keys that are rebuilt from the
// tensors.
double RebuiltLoss(const TinyLayers& tiny, const KvPlan& plan,
                   const TensorMap& tensors, const at::Tensor& weights) {
  const auto get = [&](const std::string& name) {
    return tensors.at("self_attn.k_proj." + name).to(at::kDouble);
  };
  const at::Tensor latents = tiny.inputs.mm(get("down.weight").t());
  double loss = 0;
  int64_t begin = 0;
  int64_t index = 0;
  for (const auto& group :
       plan.layers(0).key().parts(0).rope_low_rank().groups()) {
    const at::Tensor up = get("up." + std::to_string(index++) + ".weight");
    const int64_t channels = up.size(2);
    const at::Tensor latent =
        at::complex(latents.narrow(1, begin, channels).contiguous(),
                    latents.narrow(1, begin + channels, channels).contiguous());
    begin += 2 * channels;
    const at::Tensor lift =
        at::complex(up.select(1, 0).contiguous(), up.select(1, 1).contiguous());
    const std::vector<int64_t> heads(group.heads().begin(),
                                     group.heads().end());
    const at::Tensor rows = at::tensor(heads, at::kLong);
    std::vector<int64_t> ranks(4, 0);
    for (int i = 0; i < group.pairs_size(); ++i) {
      ranks[group.pairs(i)] = group.rank_per_pair(i);
    }
    int64_t channel = 0;
    for (int64_t pair = 0; pair < 4; ++pair) {
      const int64_t rank = ranks[static_cast<size_t>(pair)];
      const at::Tensor rebuilt =
          latent.narrow(1, channel, rank).mm(lift.narrow(1, channel, rank).t());
      const at::Tensor lost =
          (ComplexKeys(tiny, pair).index_select(1, rows) - rebuilt) *
          weights.select(1, pair).index_select(0, rows);
      loss += lost.abs().square().sum().item<double>();
      channel += rank;
    }
  }
  return loss;
}

// Returns the energy of the error in the layer's keys. At each pair, the heads
// are weighted by the energy of their queries.
double WeightedLoss(const TinyLayers& tiny, const KvPlan& plan) {
  const TensorMap tensors = *ApplyLayerPlan(TinyApplyRequest(tiny, plan, 0));
  const LayerCalibration& layer = tiny.calibration.layers[0];
  const PairStatistics statistics =
      *MakePairStatistics({.spec = &tiny.spec,
                           .key = tiny.weights[0].key,
                           .key_bias = tiny.weights[0].key_bias,
                           .calibration = &layer,
                           .num_tokens = tiny.calibration.num_tokens});
  double loss = 0;
  for (const auto& group :
       plan.layers(0).key().parts(0).rope_low_rank().groups()) {
    const std::vector<int64_t> heads(group.heads().begin(),
                                     group.heads().end());
    std::vector<int64_t> ranks(4, 0);
    for (int i = 0; i < group.pairs_size(); ++i) {
      ranks[group.pairs(i)] = group.rank_per_pair(i);
    }
    for (int64_t pair = 0; pair < 4; ++pair) {
      const at::Tensor energies =
          SpectrumOfPair(tiny.spec, statistics, heads, pair).energies;
      const int64_t rank = ranks[static_cast<size_t>(pair)];
      loss += energies.narrow(0, rank, energies.size(0) - rank)
                  .sum()
                  .item<double>();
    }
  }
  // The loss of the factors must be exactly the energy of the channels that
  // they leave out.
  EXPECT_NEAR(RebuiltLoss(tiny, plan, tensors, statistics.weights) / loss, 1.0,
              1e-4);
  return loss;
}

TEST(CommutingTest, TheErrorNeverGrowsWithTheGroupSize) {
  const TinyLayers tiny =
      MakeTinyLayers({.num_heads = 8, .num_kv_heads = 4}, 23);
  for (const double key_keep : {0.75, 0.5, 0.25}) {
    double before = std::numeric_limits<double>::infinity();
    for (const int64_t group_heads : {1, 2, 4}) {
      KVASIR_ASSERT_OK_AND_ASSIGN(
          const KvPlan plan,
          PlanCommuting(KeysRequest(tiny, key_keep), KeysOnly(group_heads)));
      const double loss = WeightedLoss(tiny, plan);
      EXPECT_LE(loss, before * (1 + 1e-9));
      before = loss;
    }
    EXPECT_GT(before, 0.0);
  }
}

TEST(CommutingTest,
     GroupsOfOneHeadGiveTheSameResultAsKeepingWholePairsOfEachHead) {
  const TinyLayers tiny = MakeTinyLayers({.qkv_bias = true}, 29);
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const KvPlan plan, PlanCommuting(KeysRequest(tiny, 0.5), KeysOnly(1)));
  at::Tensor mask = at::zeros({2, 8}, at::kDouble);
  int64_t pairs = 0;
  for (const auto& group :
       plan.layers(0).key().parts(0).rope_low_rank().groups()) {
    for (int i = 0; i < group.pairs_size(); ++i) {
      EXPECT_EQ(group.rank_per_pair(i), 1);
      const PairDims dims = DimsOfPair(tiny.spec.rope, group.pairs(i));
      mask[group.heads(0)][dims.first] = 1.0;
      mask[group.heads(0)][dims.second] = 1.0;
      ++pairs;
    }
  }
  EXPECT_EQ(pairs, 4);
  const at::Tensor masked = AttendWhole(tiny, 0, mask);
  EXPECT_LT(RelativeError(AttendPlanned(tiny, plan, 0), masked), kTolerance);
}

TEST(CommutingTest, QueryEnergyDecidesWhichPairsAreKept) {
  TinyLayers tiny = MakeTinyLayers({}, 31);
  at::Tensor energy = at::full({4, 8}, 1e-6, at::kDouble);
  // Both query heads of KV head 1 have energy only at pair 3, which has the
  // dims 3 and 7.
  for (const int64_t dim : {3, 7}) {
    energy.select(1, dim).narrow(0, 2, 2).fill_(1.0);
  }
  tiny.calibration.layers[0].query_energy = energy;
  // The keys of KV head 1 are short at pair 3, so only the queries favour this
  // pair.
  for (const int64_t row : {8 + 3, 8 + 7}) tiny.weights[0].key[row].mul_(0.05);
  const auto kept = [&](bool query_weights) {
    CommutingOptions options = KeysOnly(1);
    options.weights.query_weights = query_weights;
    options.weights.query_floor = 1e-9;
    auto plan = PlanCommuting(KeysRequest(tiny, 0.5), options);
    KVASIR_EXPECT_OK(plan);
    const auto& groups = plan->layers(0).key().parts(0).rope_low_rank();
    return std::vector<uint32_t>(groups.groups(1).pairs().begin(),
                                 groups.groups(1).pairs().end());
  };
  const LayerCalibration& layer = tiny.calibration.layers[0];
  const at::Tensor w = QueryWeights(tiny.spec, layer.query_energy, 1e-9);
  EXPECT_NEAR(w[1][3].item<double>(), 2.0, 1e-12);
  EXPECT_THAT(kept(true), ::testing::Contains(3u));
  EXPECT_THAT(kept(false), ::testing::Not(::testing::Contains(3u)));
}

TEST(CommutingTest, TheQueryFloorGivesWeightToHeadsWithoutQueryEnergy) {
  TinyLayers tiny = MakeTinyLayers({}, 31);
  at::Tensor energy = at::ones({4, 8}, at::kDouble);
  energy.narrow(0, 0, 2).zero_();
  const at::Tensor w = QueryWeights(tiny.spec, energy, 0.01);
  // At each pair, KV head 1 has 2 query heads with 2 dims of energy 1, so its
  // weight is sqrt(4). KV head 0 has no energy; it gets the floor, 0.01 times
  // the mean energy of 2.
  EXPECT_NEAR(w[1][0].item<double>(), 2.0, 1e-12);
  EXPECT_NEAR(w[0][0].item<double>(), std::sqrt(0.02), 1e-12);
  EXPECT_EQ(
      QueryWeights(tiny.spec, at::zeros({4, 8}), 0.01)[0][0].item<double>(),
      1.0);
}

TEST(CommutingTest, LatentsOnAllTensorParallelWorkersHaveTheSameRank) {
  const TinyLayers tiny =
      MakeTinyLayers({.num_heads = 8, .num_kv_heads = 4}, 37);
  PlanRequest request = TinyPlanRequest(tiny, 0.5);
  request.tp = 2;
  KVASIR_ASSERT_OK_AND_ASSIGN(const KvPlan plan, PlanCommuting(request, {}));
  const auto& groups = plan.layers(0).key().parts(0).rope_low_rank().groups();
  ASSERT_EQ(groups.size(), 2);
  std::vector<uint32_t> widths;
  for (const auto& group : groups) {
    EXPECT_EQ(group.heads_size(), 2);
    widths.push_back(std::accumulate(group.rank_per_pair().begin(),
                                     group.rank_per_pair().end(), 0u));
  }
  EXPECT_EQ(widths[0], widths[1]);
}

TEST(CommutingTest, InvalidRequestsAreRefusedWithTheReason) {
  const TinyLayers tiny = MakeTinyLayers({}, 41);
  PlanRequest request = TinyPlanRequest(tiny, 0.5);
  EXPECT_THAT(PlanCommuting(request, {.group_heads = 3}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("groups of 3 heads do not divide the 2")));
  request.key_codec.mutable_hadamard_fused();
  EXPECT_THAT(PlanCommuting(request, {}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("HADAMARD_FUSED")));
  request.key_codec.clear_transform();
  for (const double floor :
       {0.0, -1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    EXPECT_THAT(PlanCommuting(request, {.weights = {.query_floor = floor}}),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("must be finite and above 0")));
  }
  PlanRequest weightless = request;
  weightless.weights = nullptr;
  EXPECT_THAT(PlanCommuting(weightless, {}),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("needs the model's weights")));
  request.calibration = nullptr;
  EXPECT_THAT(PlanCommuting(request, {}),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("need a calibration")));
  CommutingOptions plain;
  plain.decomposition = Decomposition::kSvd;
  plain.weights.query_weights = false;
  KVASIR_EXPECT_OK(PlanCommuting(request, plain));
}

TEST(CommutingTest, ThePlanRecordsTheSettingsOfQueryWeights) {
  const TinyLayers tiny = MakeTinyLayers({}, 53);
  CommutingOptions options = KeysOnly(0);
  options.weights = {.query_weights = false, .query_floor = 0.25};
  KVASIR_ASSERT_OK_AND_ASSIGN(const KvPlan plan,
                              PlanCommuting(KeysRequest(tiny, 0.5), options));
  const CommutingWeights weights = CommutingWeightsOf(plan);
  EXPECT_FALSE(weights.query_weights);
  EXPECT_EQ(weights.query_floor, 0.25);
  EXPECT_TRUE(CommutingWeightsOf(KvPlan()).query_weights);
}

TEST(CommutingTest, TheLargestEntryOfAnEigenvectorIsRealAndPositive) {
  const TinyLayers tiny = MakeTinyLayers({.num_kv_heads = 4}, 59);
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const PairStatistics statistics,
      MakePairStatistics({.spec = &tiny.spec,
                          .key = tiny.weights[0].key,
                          .calibration = &tiny.calibration.layers[0],
                          .num_tokens = tiny.calibration.num_tokens}));
  const at::Tensor vectors =
      SpectrumOfPair(tiny.spec, statistics, {0, 1, 2, 3}, 1).vectors;
  const at::Tensor largest =
      vectors.gather(0, vectors.abs().argmax(0, /*keepdim=*/true));
  EXPECT_LT(at::imag(largest).abs().max().item<double>(), 1e-12);
  EXPECT_GT(at::real(largest).min().item<double>(), 0.0);
}

TEST(CommutingTest, LayersWithoutRopeThatKeepEverythingEqualTheBaseModel) {
  TinyLayers tiny = MakeTinyLayers({.num_layers = 2}, 61);
  tiny.spec.layers[1].rope = false;
  const at::Tensor whole = AttendWhole(tiny, 1);
  PlanRequest request = TinyPlanRequest(tiny, 1.0);
  // Without codes, latents of full rank would be replaced by whole keys. So
  // codes are set here, but the test does not apply them.
  request.key_codec = BitsCodec(8);
  for (const auto& plan : {PlanCommuting(request, {}), PlanRap(request, {})}) {
    KVASIR_ASSERT_OK(plan);
    EXPECT_TRUE(plan->layers(1).key().parts(0).has_low_rank());
    EXPECT_LT(RelativeError(AttendPlanned(tiny, *plan, 1), whole), 1e-4);
  }
}

TEST(CommutingTest, LayersWithoutRopeGetLowRankPartsWithoutPairs) {
  TinyLayers tiny = MakeTinyLayers({.num_layers = 2}, 43);
  tiny.spec.layers[1].rope = false;
  const PlanRequest request = TinyPlanRequest(tiny, 0.5);
  for (const auto& plan : {PlanCommuting(request, {}), PlanRap(request, {})}) {
    KVASIR_ASSERT_OK(plan);
    ExpectPlanStands(request, *plan);
    EXPECT_FALSE(plan->layers(0).key().parts(0).has_low_rank());
    const Part& keys = plan->layers(1).key().parts(0);
    ASSERT_TRUE(keys.has_low_rank());
    EXPECT_EQ(keys.stored(), kvasir::v1::NO_ROPE);
    EXPECT_FALSE(keys.uses(0).has_reconstruct());
    KVASIR_EXPECT_OK(ApplyLayerPlan(TinyApplyRequest(tiny, *plan, 1)));
  }
}

}  // namespace
}  // namespace kvasir::compress
