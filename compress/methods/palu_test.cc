#include "compress/methods/palu.h"

#include <limits>
#include <string>

#include "base/status_matchers.h"
#include "compress/methods/low_rank_plan.h"
#include "compress/testing/planner_fixture.h"

namespace kvasir::compress {
namespace {

using ::kvasir::base::StatusIs;
using ::kvasir::v1::KvPlan;
using ::kvasir::v1::Part;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

KvPlan Plan(const PlanRequest& request, const PaluOptions& options) {
  const auto plan = PlanPalu(request, options);
  KVASIR_EXPECT_OK(plan);
  return plan.ok() ? *plan : KvPlan{};
}

const Part& Key(const KvPlan& plan, int layer, int part = 0) {
  return plan.layers(layer).key().parts(part);
}
const Part& Value(const KvPlan& plan, int layer) {
  return plan.layers(layer).value().parts(0);
}

// Makes a calibration of one layer with two KV heads of 16 dims. `scores` has
// the Fisher root scores of the two key heads and the two value heads, then
// their sum scores in the same order.
Calibration Scores(std::vector<double> scores) {
  Calibration calibration;
  calibration.layers.resize(1);
  LayerCalibration& layer = calibration.layers[0];
  const auto rows = [&](size_t first) {
    return at::tensor({scores[first], scores[first + 1]}, at::kDouble)
        .repeat_interleave(16);
  };
  layer.key_fisher_root = rows(0);
  layer.value_fisher_root = rows(2);
  layer.key_fisher = rows(4);
  layer.value_fisher = rows(6);
  return calibration;
}

class PaluTinyTest : public ::testing::Test {
 protected:
  // By default half of the 64 numbers per token are kept.
  PlanRequest request_ = RequestOf(
      {.layers = 1, .heads = 4, .kv_heads = 2, .head_dim = 16, .hidden = 64});
  Calibration calibration_ = Scores({1, 2, 1, 4, 1, 1, 5, 1});
  void SetUp() override {
    request_.calibration = &calibration_;
    request_.rank_multiple = 4;
  }
};

TEST_F(PaluTinyTest,
       TheFisherSearchDividesOneBudgetOverAllGroupsOfKeysAndValues) {
  const KvPlan plan = Plan(request_, {.group_heads = 1});
  EXPECT_THAT(RanksOf(Key(plan, 0)), ElementsAre(4, 8));
  EXPECT_THAT(RanksOf(Value(plan, 0)), ElementsAre(4, 16));
}

TEST_F(PaluTinyTest, RanksFollowTheSummedFisherInformationIfTheScoreIsSum) {
  const KvPlan plan =
      Plan(request_, {.group_heads = 1, .score = FisherScore::kSum});
  // The scores are 1, 1, 5 and 1. The group with score 5 gets its full rank of
  // 16.
  EXPECT_THAT(RanksOf(Key(plan, 0)), ElementsAre(8, 4));
  EXPECT_THAT(RanksOf(Value(plan, 0)), ElementsAre(16, 4));
}

TEST_F(PaluTinyTest, TheModuleSearchGivesAllGroupsOfAProjectionTheSameRank) {
  const KvPlan plan =
      Plan(request_, {.group_heads = 1, .search = RankSearch::kModule});
  // Keys and values share 32 numbers in the ratio 3 : 5. A step is 8 numbers,
  // because both groups of a projection take a step of 4 together.
  EXPECT_THAT(RanksOf(Key(plan, 0)), ElementsAre(8, 8));
  EXPECT_THAT(RanksOf(Value(plan, 0)), ElementsAre(8, 8));
  calibration_ = Scores({1, 1, 1, 5, 1, 1, 1, 1});
  // Keys and values share 32 numbers in the ratio 2 : 6.
  const KvPlan tilted =
      Plan(request_, {.group_heads = 1, .search = RankSearch::kModule});
  EXPECT_THAT(RanksOf(Key(tilted, 0)), ElementsAre(4, 4));
  EXPECT_THAT(RanksOf(Value(tilted, 0)), ElementsAre(12, 12));
}

TEST_F(PaluTinyTest, TheUniformSearchNeedsNoCalibration) {
  request_.calibration = nullptr;
  const KvPlan plan =
      Plan(request_, {.group_heads = 1, .search = RankSearch::kUniform});
  EXPECT_THAT(RanksOf(Key(plan, 0)), ElementsAre(8, 8));
  EXPECT_THAT(RanksOf(Value(plan, 0)), ElementsAre(8, 8));
  EXPECT_EQ(plan.method(), "uniform");
}

TEST_F(PaluTinyTest, AGroupSizeOfZeroPutsAllHeadsIntoOneGroup) {
  const KvPlan plan = Plan(request_, {.group_heads = 0});
  EXPECT_THAT(Key(plan, 0).low_rank().groups(0).heads(), ElementsAre(0, 1));
  // Keys and values share 32 numbers in the ratio 3 : 5.
  EXPECT_THAT(RanksOf(Key(plan, 0)), ElementsAre(12));
  EXPECT_THAT(RanksOf(Value(plan, 0)), ElementsAre(20));
}

TEST(PaluTest, PlansRecordTheirProvenance) {
  PlanRequest request = RequestOf({});
  const Calibration calibration = FisherCalibration(request.spec, 1);
  request.calibration = &calibration;
  const KvPlan plan = Plan(
      request, {.group_heads = 2, .decomposition = Decomposition::kEspace});
  EXPECT_EQ(plan.method(), "palu");
  EXPECT_EQ(plan.provenance().decomposition(), "espace");
  EXPECT_EQ(plan.provenance().calibration_id(), "test-calibration");
  EXPECT_THAT(plan.provenance().options(),
              AllOf(HasSubstr("--keep 0.5"), HasSubstr("--group-heads 2"),
                    HasSubstr("--search fisher")));
}

// Checks numbers and bytes for every search, group size, kept share and number
// of tensor-parallel ranks.
TEST(PaluTest, ThePlanLeavesLessThanOneRankStepOfTheBudgetUnused) {
  for (const TinyModel& model :
       {TinyModel{}, TinyModel{.heads = 4}, TinyModel{.rotary_dim = 8},
        TinyModel{.head_dim = 24, .rotary_dim = 24, .bias = true}}) {
    PlanRequest request = RequestOf(model);
    const Calibration calibration = FisherCalibration(request.spec, 5);
    request.calibration = &calibration;
    const int64_t dense = 2 * model.layers * model.kv_heads * model.head_dim;
    for (const double keep : {0.3, 0.5, 0.77, 1.0}) {
      for (const int64_t group_heads : {1, 2, 0}) {
        for (const int64_t tp : {1, 2}) {
          for (const RankSearch search :
               {RankSearch::kFisher, RankSearch::kModule,
                RankSearch::kUniform}) {
            request.keep = keep;
            request.tp = tp;
            request.rank_multiple = 2;
            const KvPlan plan =
                Plan(request, {.group_heads = group_heads, .search = search});
            // In one step, all groups that must have the same rank get one
            // rank_multiple more.
            const int64_t groups =
                group_heads == 0 ? tp : model.kv_heads / group_heads;
            const int64_t step =
                2 * (search == RankSearch::kModule ? groups : tp);
            const int64_t kept = KeptBy(plan, request.spec);
            const auto target = static_cast<double>(dense) * keep;
            EXPECT_LE(static_cast<double>(kept), target + 1e-6);
            EXPECT_GT(static_cast<double>(kept + step), target);
            const double bytes = LaidOutBytes(plan, request.spec);
            EXPECT_EQ(bytes, 2.0 * static_cast<double>(kept));
            EXPECT_EQ(bytes, plan.target().kv_bytes_per_token());
          }
        }
      }
    }
  }
}

TEST(PaluTest, AtFullRankKeysAndValuesAreStoredUncompressed) {
  PlanRequest request = RequestOf({.head_dim = 12, .rotary_dim = 12});
  const Calibration calibration = FisherCalibration(request.spec, 2);
  request.calibration = &calibration;
  request.keep = 1;
  const KvPlan plan = Plan(request, {.group_heads = 2});
  for (int layer = 0; layer < 3; ++layer) {
    EXPECT_TRUE(Key(plan, layer).has_full());
    EXPECT_EQ(Key(plan, layer).stored(), kvasir::v1::POST_ROPE);
    EXPECT_TRUE(Value(plan, layer).has_full());
  }
  // Latents with a Hadamard transform or codes stay latents even if they have
  // full rank.
  const KvPlan rotated = Plan(request, {.group_heads = 2, .hadamard = true});
  request.key_codec = request.value_codec = BitsCodec(4);
  const KvPlan coded = Plan(request, {.group_heads = 2});
  for (const KvPlan* latents : {&rotated, &coded}) {
    for (int layer = 0; layer < 3; ++layer) {
      EXPECT_THAT(RanksOf(Key(*latents, layer)), ElementsAre(24, 24));
      EXPECT_THAT(RanksOf(Value(*latents, layer)), ElementsAre(24, 24));
    }
  }
}

TEST(PaluTest, KeysWithPartialRopeAreStoredWholeOnlyIfBothPartsHaveFullRank) {
  PlanRequest request = RequestOf({.rotary_dim = 4});
  request.keep = 1;
  const PaluOptions uniform{.group_heads = 2, .search = RankSearch::kUniform};
  const KvPlan all = Plan(request, uniform);
  EXPECT_EQ(all.layers(0).key().parts_size(), 1);
  EXPECT_TRUE(Key(all, 0).has_full());
  request.keep = 0.6;
  EXPECT_EQ(Plan(request, uniform).layers(0).key().parts_size(), 2);
}

TEST(PaluTest, OptionsRecordedInAPlanAreParsedBackAsTheSameNumbers) {
  EXPECT_EQ(NumberText(0.5), "0.5");
  for (const double number : {0.123456789012345, 1.0 / 3, 1e-300, -7.0}) {
    EXPECT_EQ(std::stod(NumberText(number)), number);
  }
  PlanRequest request = RequestOf({});
  request.keep = 0.6180339887498949;
  EXPECT_THAT(
      Plan(request, {.search = RankSearch::kUniform}).provenance().options(),
      HasSubstr("--keep 0.6180339887498949 "));
}

TEST(PaluTest, OnlyKeysThatRotateAreRebuiltInsteadOfFolded) {
  PlanRequest request = RequestOf({});
  request.spec.layers[1].rope = false;
  const KvPlan plan =
      Plan(request, {.group_heads = 2, .search = RankSearch::kUniform});
  EXPECT_EQ(Key(plan, 0).stored(), kvasir::v1::PRE_ROPE);
  EXPECT_TRUE(Key(plan, 0).uses(0).has_reconstruct());
  EXPECT_EQ(Key(plan, 0).uses(0).pairs_size(), 0);
  EXPECT_EQ(Key(plan, 1).stored(), kvasir::v1::NO_ROPE);
  EXPECT_TRUE(Key(plan, 1).uses(0).has_fold());
  EXPECT_EQ(Value(plan, 0).stored(), kvasir::v1::NO_ROPE);
}

TEST(PaluTest, KeysWithPartialRopeAreStoredAsTwoPartsWithSeparateRanks) {
  PlanRequest request = RequestOf({.rotary_dim = 4});
  Calibration calibration = FisherCalibration(request.spec, 3);
  for (LayerCalibration& layer : calibration.layers) {
    // Only the scores of dims that rotate are large enough to matter.
    layer.key_fisher_root.view({4, 16}).narrow(1, 4, 12).fill_(1e-9);
  }
  request.calibration = &calibration;
  request.rank_multiple = 2;
  const KvPlan plan = Plan(request, {.group_heads = 2});
  for (int layer = 0; layer < 3; ++layer) {
    ASSERT_EQ(plan.layers(layer).key().parts_size(), 2);
    EXPECT_TRUE(Key(plan, layer, 0).uses(0).has_reconstruct());
    EXPECT_THAT(Key(plan, layer, 0).uses(0).pairs(), ElementsAre(0, 1));
    EXPECT_EQ(Key(plan, layer, 1).stored(), kvasir::v1::NO_ROPE);
    EXPECT_FALSE(Key(plan, layer, 1).uses(0).has_reconstruct());
    EXPECT_THAT(RanksOf(Key(plan, layer, 1)), Each(2));
  }
}

TEST(PaluTest, TheLiftOfValuesIsFoldedIfThatReadsFewerWeights) {
  // At rank R, FOLD reads Hq R M weights, and AT_RUNTIME reads Hkv R D + Hq D
  // M. With a width M of 96, a head dim D of 16, Hq = 8 query heads and Hkv = 4
  // KV heads, FOLD reads fewer weights up to R = 17.
  PlanRequest request = RequestOf({});
  const auto value_of = [&](double keep, int64_t group_heads,
                            bool hadamard = false) {
    request.keep = keep;
    return Value(Plan(request, {.group_heads = group_heads,
                                .search = RankSearch::kUniform,
                                .hadamard = hadamard}),
                 0);
  };
  EXPECT_TRUE(value_of(0.5, 2).uses(0).has_fold());         // R = 16
  EXPECT_TRUE(value_of(0.75, 2).uses(0).has_at_runtime());  // R = 24
  EXPECT_TRUE(value_of(0.5, 0).uses(0).has_at_runtime());   // R = 32
  EXPECT_TRUE(value_of(1.0, 1, true).uses(0).has_fold());   // R = 16
}

TEST(PaluTest, AHadamardTransformIsFusedIntoEveryPartOfThePlan) {
  PlanRequest request = RequestOf({});
  request.key_codec = BitsCodec(3);
  request.value_codec = BitsCodec(2);
  const KvPlan plan = Plan(
      request,
      {.group_heads = 2, .search = RankSearch::kUniform, .hadamard = true});
  EXPECT_TRUE(Key(plan, 2).codec().has_hadamard_fused());
  EXPECT_TRUE(Value(plan, 2).codec().has_hadamard_fused());
  EXPECT_EQ(Key(plan, 2).codec().bits().schedule(0), 3u);
  // Each side has 2 groups of 16 codes. The codes of a group take 6 bytes for
  // keys and 4 bytes for values; scale and minimum take 4 bytes more.
  EXPECT_EQ(plan.target().kv_bytes_per_token(),
            3 * (2 * (6 + 4) + 2 * (4 + 4)));
}

TEST(PaluTest,
     CorrespondingGroupsOfTensorParallelWorkersHaveTheSameLatentRank) {
  PlanRequest request = RequestOf({});
  const Calibration calibration = FisherCalibration(request.spec, 8);
  request.calibration = &calibration;
  request.tp = 2;
  request.rank_multiple = 4;
  const KvPlan plan = Plan(request, {.group_heads = 1});
  for (int layer = 0; layer < 3; ++layer) {
    for (const Part* part : {&Key(plan, layer), &Value(plan, layer)}) {
      const std::vector<int64_t> ranks = RanksOf(*part);
      EXPECT_EQ(ranks[0], ranks[2]);
      EXPECT_EQ(ranks[1], ranks[3]);
    }
  }
}

TEST(PaluTest, TensorParallelRanksHaveWholeGroupsInPagesOfOneSize) {
  PlanRequest request = RequestOf({});
  const Calibration calibration = FisherCalibration(request.spec, 8);
  request.calibration = &calibration;
  for (const int64_t tp : {2, 4}) {
    request.tp = tp;
    for (const RankSearch search :
         {RankSearch::kFisher, RankSearch::kModule, RankSearch::kUniform}) {
      for (const int64_t group_heads : {0, 1}) {
        ExpectEqualRanks(
            Plan(request, {.group_heads = group_heads, .search = search}),
            request.spec);
      }
    }
  }
}

TEST(PaluTest, TensorParallelRanksThatShareAHeadUseTheSameGroup) {
  PlanRequest request = RequestOf({});
  const Calibration calibration = FisherCalibration(request.spec, 8);
  request.calibration = &calibration;
  request.tp = 4;
  const KvPlan four = Plan(request, {.group_heads = 0});
  request.tp = 8;
  const KvPlan eight = Plan(request, {.group_heads = 0});
  EXPECT_EQ(eight.target().tp(), 8u);
  EXPECT_EQ(eight.target().kv_bytes_per_token(),
            four.target().kv_bytes_per_token());
  for (int layer = 0; layer < 3; ++layer) {
    EXPECT_EQ(RanksOf(Key(eight, layer)), RanksOf(Key(four, layer)));
    EXPECT_EQ(RanksOf(Key(eight, layer)).size(), 4u);
  }
}

TEST(PaluTest, GroupsThatDoNotDivideTheHeadsAreRefused) {
  PlanRequest request = RequestOf({});
  const PaluOptions three{.group_heads = 3, .search = RankSearch::kUniform};
  EXPECT_THAT(PlanPalu(request, three),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("groups of 3 heads do not divide the 4 KV")));
  request.tp = 2;
  const PaluOptions four{.group_heads = 4, .search = RankSearch::kUniform};
  EXPECT_THAT(PlanPalu(request, four),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("each of 2 tensor-parallel ranks has 2"),
                             HasSubstr("possible group sizes: 1, 2"))));
  request.tp = 3;
  EXPECT_THAT(
      PlanPalu(request, four),
      StatusIs(absl::StatusCode::kInvalidArgument,
               AllOf(HasSubstr("4 KV heads, 8 query heads"),
                     HasSubstr("cannot be divided among 3"),
                     HasSubstr("possible numbers of ranks: 1, 2, 4 or 8"))));
}

TEST(PaluTest, InvalidRequestsAreRefused) {
  PlanRequest request = RequestOf({});
  EXPECT_THAT(PlanPalu(request, {.group_heads = 2}),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("needs a calibration with Fisher")));
  Calibration calibration = FisherCalibration(request.spec, 1);
  request.calibration = &calibration;
  calibration.layers[1].value_fisher_root[20] =
      std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(PlanPalu(request, {.group_heads = 2}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("layer 1 value head 1 dim 4")));
  calibration.layers[1].value_fisher_root = at::Tensor();
  EXPECT_THAT(PlanPalu(request, {.group_heads = 2}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("layer 1 value: the calibration's Fisher")));
  calibration.layers.pop_back();
  EXPECT_THAT(
      PlanPalu(request, {.group_heads = 2}),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("calibration has 2 layers, but the model has 3")));
  request.calibration = nullptr;
  for (const double keep : {0.0, -1.0, 1.5, std::nan("")}) {
    request.keep = keep;
    EXPECT_THAT(
        PlanPalu(request, {.search = RankSearch::kUniform}),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("kept share")));
  }
  request.keep = 0.5;
  for (const int64_t multiple :
       {int64_t{0}, int64_t{65}, std::numeric_limits<int64_t>::max()}) {
    request.rank_multiple = multiple;
    EXPECT_THAT(PlanPalu(request, {.search = RankSearch::kUniform}),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("--rank-multiple")));
  }
  request.rank_multiple = 8;
  request.keep = 0.05;
  EXPECT_THAT(
      PlanPalu(request, {.group_heads = 1, .search = RankSearch::kUniform}),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("keep 0.05")));
}

TEST(PaluTest, NamesOfSearchesAndScoresAreParsedBackToTheSameValues) {
  for (RankSearch search :
       {RankSearch::kFisher, RankSearch::kModule, RankSearch::kUniform}) {
    EXPECT_EQ(*ParseRankSearch(RankSearchName(search)), search);
  }
  for (FisherScore score : {FisherScore::kMeanRoot, FisherScore::kSum}) {
    EXPECT_EQ(*ParseFisherScore(FisherScoreName(score)), score);
  }
  EXPECT_THAT(ParseRankSearch("best"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("fisher, module or uniform")));
  EXPECT_THAT(ParseFisherScore("mean"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("mean-root or sum")));
}

}  // namespace
}  // namespace kvasir::compress
