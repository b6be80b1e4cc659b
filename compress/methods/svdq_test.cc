#include "compress/methods/svdq.h"

#include "base/status_matchers.h"
#include "compress/testing/planner_fixture.h"

namespace kvasir::compress {
namespace {

using ::kvasir::base::StatusIs;
using ::kvasir::v1::KvPlan;
using ::kvasir::v1::Part;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

KvPlan Plan(const PlanRequest& request, const SvdqOptions& options) {
  const auto plan = PlanSvdq(request, options);
  KVASIR_EXPECT_OK(plan);
  return plan.ok() ? *plan : KvPlan{};
}

const Part& Key(const KvPlan& plan, int layer) {
  return plan.layers(layer).key().parts(0);
}

// The model has 4 KV heads of 16 dims, so 64 key channels in each of 3 layers.
class SvdqTest : public ::testing::Test {
 protected:
  PlanRequest request_ = RequestOf({.bias = true});
};

TEST_F(SvdqTest,
       ByDefaultKeysBeforeTheirRotationHaveOneCentredBasisForAllHeads) {
  const KvPlan plan = Plan(request_, {});
  EXPECT_EQ(plan.method(), "svdq");
  const Part& key = Key(plan, 0);
  EXPECT_THAT(RanksOf(key), ElementsAre(64));
  EXPECT_EQ(key.stored(), kvasir::v1::PRE_ROPE);
  EXPECT_TRUE(key.uses(0).has_reconstruct());
  EXPECT_TRUE(key.mean());
  EXPECT_TRUE(key.latent_bias());
  EXPECT_TRUE(key.codec().has_basis_static());
  EXPECT_TRUE(key.codec().has_channel_static());
  EXPECT_THAT(key.codec().bits().schedule(),
              ElementsAre(8, 4, 4, 4, 2, 2, 0, 0));
  EXPECT_EQ(plan.layers(0).value().parts(0).codec().dtype(), kvasir::v1::BF16);
}

TEST_F(SvdqTest, BytesDependOnlyOnTheSchedule) {
  // The default schedule has 3 bits on average, so a layer's 64 key channels
  // take 24 bytes. Its 64 values take 2 bytes each. There are three layers.
  const KvPlan plan = Plan(request_, {});
  EXPECT_EQ(LaidOutBytes(plan, request_.spec), 3 * (24 + 128));
  EXPECT_EQ(plan.target().kv_bytes_per_token(), 3 * (24 + 128));
  // This schedule has 1.75 bits on average, so keys take 14 bytes in each
  // layer. The values of each of the 4 heads take 8 bytes of codes and 4 bytes
  // of scale and minimum.
  const KvPlan coded =
      Plan(request_, {.schedule = {8, 4, 2, 0, 0, 0, 0, 0}, .value_bits = 4});
  EXPECT_EQ(LaidOutBytes(coded, request_.spec), 3 * (14 + 4 * 12));
}

TEST_F(SvdqTest, WithPostRopeTheBasisCoversAllDimsOfTheKeys) {
  request_.spec.layers[2].rope = false;
  const KvPlan plan = Plan(request_, {.post_rope = true});
  const Part& key = Key(plan, 0);
  EXPECT_TRUE(key.has_full());
  EXPECT_EQ(key.stored(), kvasir::v1::POST_ROPE);
  EXPECT_TRUE(key.mean());
  EXPECT_TRUE(key.codec().has_basis_static());
  EXPECT_EQ(LaidOutBytes(plan, request_.spec), 3 * (24 + 128));
  // Layer 2 has no RoPE, so keys are the same before and after the rotation.
  EXPECT_TRUE(Key(plan, 2).has_low_rank());
  EXPECT_EQ(Key(plan, 2).stored(), kvasir::v1::NO_ROPE);
}

TEST_F(SvdqTest, EachTensorParallelRankHasItsOwnBasis) {
  request_.tp = 2;
  EXPECT_THAT(RanksOf(Key(Plan(request_, {}), 0)), ElementsAre(32, 32));
  ExpectEqualRanks(Plan(request_, {}), request_.spec);
  EXPECT_THAT(PlanSvdq(request_, {.post_rope = true}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("one basis over all KV heads")));
}

TEST_F(SvdqTest, ABasisHasNoMoreChannelsThanTheModelsHiddenSize) {
  const PlanRequest request = RequestOf({.kv_heads = 8, .hidden = 96});
  EXPECT_THAT(RanksOf(Key(Plan(request, {}), 0)), ElementsAre(96));
}

TEST_F(SvdqTest, InvalidSchedulesAreRefused) {
  const auto invalid = [](const char* text) {
    return StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text));
  };
  EXPECT_THAT(PlanSvdq(request_, {.schedule = {4}}),
              invalid("must have 8 bit widths, has 1"));
  EXPECT_THAT(PlanSvdq(request_, {.schedule = {8, 7, 4, 4, 0, 0, 0, 0}}),
              invalid("bits must be 0 to 6 or 8, but are 7"));
  EXPECT_THAT(PlanSvdq(request_, {.schedule = {0, 0, 0, 0, 0, 0, 0, 0}}),
              invalid("stores nothing"));
  const PlanRequest odd =
      RequestOf({.heads = 3, .kv_heads = 3, .head_dim = 4, .rotary_dim = 4});
  EXPECT_THAT(PlanSvdq(odd, {}),
              invalid("a multiple of 8, but the width is 12"));
  request_.keep = 2;
  EXPECT_THAT(PlanSvdq(request_, {}), invalid("kept share"));
}

class ChannelCodesTest : public ::testing::Test {
 protected:
  PlanRequest request_ = RequestOf({.layers = 4});
  std::vector<int64_t> Bits(double average) {
    const auto plan = PlanChannelCodes(request_, {.average_bits = average});
    KVASIR_EXPECT_OK(plan);
    std::vector<int64_t> bits;
    if (!plan.ok()) return bits;
    for (const auto& layer : plan->layers()) {
      bits.push_back(layer.key().parts(0).codec().bits().schedule(0));
    }
    return bits;
  }
};

TEST_F(ChannelCodesTest, TheFirstLayersGetMoreBitsToMeetTheAverage) {
  EXPECT_THAT(Bits(3), ElementsAre(3, 3, 3, 3));
  EXPECT_THAT(Bits(2.25), ElementsAre(3, 2, 2, 2));
  EXPECT_THAT(Bits(1.75), ElementsAre(2, 2, 2, 1));
  EXPECT_THAT(Bits(1.3), ElementsAre(2, 1, 1, 1));
  EXPECT_THAT(Bits(6), ElementsAre(8, 8, 4, 4));
  EXPECT_THAT(Bits(8), ElementsAre(8, 8, 8, 8));
}

TEST_F(ChannelCodesTest, KeysTakeTheSameBytesAsWithSvdqAtEqualAverageBits) {
  const KvPlan svdq =
      Plan(request_, {.schedule = {8, 4, 4, 2, 0, 0, 0, 0}, .value_bits = 4});
  for (const bool post_rope : {false, true}) {
    KVASIR_ASSERT_OK_AND_ASSIGN(
        const KvPlan codes, PlanChannelCodes(request_, {.average_bits = 2.25,
                                                        .post_rope = post_rope,
                                                        .value_bits = 4}));
    EXPECT_EQ(Key(codes, 0).stored(),
              post_rope ? kvasir::v1::POST_ROPE : kvasir::v1::PRE_ROPE);
    EXPECT_TRUE(Key(codes, 0).codec().has_channel_static());
    EXPECT_EQ(LaidOutBytes(codes, request_.spec),
              LaidOutBytes(svdq, request_.spec));
  }
}

TEST_F(ChannelCodesTest, AnAverageOutsideThePossibleBitWidthsIsRefused) {
  for (const double average : {0.5, 9.0, std::nan("")}) {
    EXPECT_THAT(PlanChannelCodes(request_, {.average_bits = average}),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("per key channel must be 1..8")));
  }
}

}  // namespace
}  // namespace kvasir::compress
