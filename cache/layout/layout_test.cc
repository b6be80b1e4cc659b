#include "cache/layout/layout.h"

#include <algorithm>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "cache/layout/exact_rows.h"
#include "cache/layout/layer_layout.h"
#include "plan/plan.h"
#include "plan/resolved_plan.h"

namespace kvasir::cache {
namespace {

using base::StatusIs;
using kvasir::v1::BF16;
using kvasir::v1::F16;
using kvasir::v1::F32;
using kvasir::v1::KvPlan;
using ::testing::AllOf;
using ::testing::DoubleEq;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

plan::AttentionShape Shape(int64_t layers, int64_t kv_heads, int64_t head_dim) {
  plan::AttentionShape shape;
  shape.num_kv_heads = kv_heads;
  shape.head_dim = head_dim;
  shape.rotary_dim = head_dim;
  shape.layers.resize(static_cast<size_t>(layers));
  return shape;
}

PageLayout LayOut(const KvPlan& plan, const plan::AttentionShape& shape,
                  const PageFormat& format, plan::TpShard shard = {}) {
  absl::StatusOr<PageLayout> layout =
      PageLayout::Create(plan, shape, format, shard);
  KVASIR_EXPECT_OK(layout);
  return *std::move(layout);
}

PageFormat PageTokens(int64_t page_tokens) {
  return {.page_tokens = page_tokens};
}

// Returns a plan whose keys have the single part that `part_json` describes,
// and whose values are not compressed.
KvPlan PlanWithKey(const plan::AttentionShape& shape,
                   const std::string& part_json) {
  std::string layers;
  for (int64_t l = 0; l < shape.num_layers(); ++l) {
    layers += std::string(l == 0 ? "" : ",") + R"({"key":{"parts":[)" +
              part_json +
              R"(]},"value":{"parts":[{"full":{},"stored":"NO_ROPE",)"
              R"("codec":{"dtype":"BF16"}}]}})";
  }
  absl::StatusOr<KvPlan> plan = plan::ParsePlanJson(
      R"({"schema_version":1,"layers":[)" + layers + "]}", "test");
  KVASIR_EXPECT_OK(plan);
  return *std::move(plan);
}

TEST(PageLayoutTest, APageConsistsOfTilesWhoseBytesAreContiguous) {
  const plan::AttentionShape shape = Shape(2, 2, 24);
  const KvPlan plan = plan::FullRankPlan(shape, BF16);
  const PageLayout one = LayOut(plan, shape, PageTokens(64));
  const PageLayout three = LayOut(plan, shape, PageTokens(192));
  EXPECT_EQ(one.tile_slots(), 64);
  EXPECT_EQ(three.tile_slots(), 64);
  EXPECT_EQ(LayOut(plan, shape, PageTokens(16)).tile_slots(), 16);
  for (int64_t l = 0; l < 2; ++l) {
    const LayerLayout& tile = one.layer(l);
    const LayerLayout& page = three.layer(l);
    EXPECT_EQ(tile.tile_bytes, 4 * 64 * 48);
    EXPECT_EQ(tile.page_bytes, tile.tile_bytes);
    EXPECT_EQ(page.tile_bytes, tile.tile_bytes);
    EXPECT_EQ(page.page_bytes, 3 * tile.tile_bytes);
    EXPECT_EQ(page.payload_bytes, 3 * tile.payload_bytes);
    for (const plan::Side side : {plan::Side::kKey, plan::Side::kValue}) {
      for (size_t g = 0; g < 2; ++g) {
        EXPECT_EQ(page.side(side).parts[0].groups[g].codes,
                  tile.side(side).parts[0].groups[g].codes);
      }
    }
  }
}

// A slot has 20 codes of 4 bits and 20 codes of 2 bits, together 15 bytes. All
// codes of a slot are stored one after another in granules of 16 bytes, so
// there is padding only after the last code. The slot's ranges take 8 bytes, in
// granules of 4 bytes.
TEST(PageLayoutTest, PaddingUpToWholeGranulesIsCountedAsWaste) {
  const plan::AttentionShape shape = Shape(1, 1, 40);
  const KvPlan plan = PlanWithKey(
      shape, R"({"full":{},"stored":"POST_ROPE","codec":{"bits":{"runs":[)"
             R"({"channels":20,"bits":4},{"channels":20,"bits":2}]},)"
             R"("per_token":{},"param_dtype":"F16"}})");
  const auto key = [](const PageLayout& layout) {
    return layout.layer(0).key.parts[0].groups[0];
  };
  const PageLayout plain = LayOut(plan, shape, PageTokens(64));
  const PageLayout granules =
      LayOut(plan, shape, {.page_tokens = 64, .granule_bytes = 16});
  EXPECT_EQ(key(plain).codes, (Region{0, 15, 15, 64}));
  EXPECT_EQ(key(plain).params, (Region{1024, 8, 8, 64}));
  EXPECT_EQ(key(granules).codes, (Region{0, 15, 16, 64}));
  EXPECT_EQ(key(granules).params, (Region{1024, 8, 8, 64}));
  EXPECT_EQ(granules.param_granule_bytes(), 4);
  EXPECT_EQ(granules.layer(0).payload_bytes, plain.layer(0).payload_bytes);
}

// A slot has 32 codes of 4 bits (16 bytes) and one range: a scale and a minimum
// of 2 bytes each.
TEST(PageLayoutTest, TheRangesOfQuantizedCodesArePaddedToSmallGranules) {
  const plan::AttentionShape shape = Shape(1, 1, 32);
  const KvPlan plan = PlanWithKey(
      shape, R"({"full":{},"stored":"POST_ROPE","codec":{"bits":{"runs":[)"
             R"({"channels":32,"bits":4}]},"per_token":{},)"
             R"("param_dtype":"F16"}})");
  const GroupLayout key =
      LayOut(plan, shape, {.page_tokens = 64, .granule_bytes = 16})
          .layer(0)
          .key.parts[0]
          .groups[0];
  EXPECT_EQ(key.codes, (Region{0, 16, 16, 64}));
  EXPECT_EQ(key.params, (Region{1024, 4, 4, 64}));
}

TEST(PageLayoutTest, PageFormatsOutOfRangeAreRefused) {
  const plan::AttentionShape shape = Shape(1, 1, 40);
  const KvPlan plan = plan::FullRankPlan(shape, BF16);
  const auto refuses = [&](const PageFormat& format, const char* why) {
    EXPECT_THAT(
        PageLayout::Create(plan, shape, format),
        base::StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(why)));
  };
  refuses(PageTokens(96), "a multiple of 64 up to 4096, but is 96");
  refuses(PageTokens(0), "but is 0");
  refuses(PageTokens(4096 + 64), "but is 4160");
  refuses({.granule_bytes = 24}, "power of two up to 128, but is 24");
  refuses({.granule_bytes = 256}, "but is 256");
  refuses({.granule_bytes = -16}, "but is -16");
}

TEST(PageLayoutTest, AnUncompressedPageStoresAllKeyHeadsBeforeTheValueHeads) {
  const plan::AttentionShape shape = Shape(2, 2, 64);
  const PageLayout layout =
      LayOut(plan::FullRankPlan(shape, BF16), shape, PageTokens(16));
  // Each head takes 16 slots * 64 numbers * 2 bytes = 2048 bytes. The order is
  // keys of head 0, keys of head 1, values of head 0, values of head 1.
  const PartLayout& key = layout.layer(1).key.parts[0];
  const PartLayout& value = layout.layer(1).value.parts[0];
  ASSERT_EQ(key.groups.size(), 2u);
  EXPECT_EQ(key.groups[0].codes.offset_bytes, 0);
  EXPECT_EQ(key.groups[1].codes.offset_bytes, 2048);
  EXPECT_EQ(key.groups[0].codes.slot_bytes, 128);
  EXPECT_EQ(key.groups[0].width, 64);
  EXPECT_EQ(key.dtype, BF16);
  EXPECT_EQ(value.groups[0].codes.offset_bytes, 4096);
  EXPECT_EQ(layout.layer(1).page_bytes, 8192);
  EXPECT_EQ(layout.layer(1).payload_bytes, 8192);
  EXPECT_THAT(layout.marginal_bytes_per_token(), DoubleEq(1024));
  EXPECT_EQ(layout.dense_bf16_bytes_per_token(), 1024);
  EXPECT_THAT(layout.compression_ratio(), DoubleEq(1));
  EXPECT_EQ(layout.fixed_bytes_per_sequence(), 0);
  EXPECT_TRUE(layout.prefix_reusable());
}

TEST(PageLayoutTest, ThePaddingThatAlignsRegionsIsCountedAsWaste) {
  const plan::AttentionShape shape = Shape(1, 3, 10);
  const PageLayout layout =
      LayOut(plan::FullRankPlan(shape, BF16), shape, PageTokens(16));
  const std::vector<GroupLayout>& heads = layout.layer(0).key.parts[0].groups;
  EXPECT_EQ(heads[0].codes.slot_bytes, 20);
  // 320 bytes, rounded up to a multiple of 128
  EXPECT_EQ(heads[1].codes.offset_bytes, 384);
  for (const SideLayout* side :
       {&layout.layer(0).key, &layout.layer(0).value}) {
    for (const GroupLayout& group : side->parts[0].groups) {
      EXPECT_EQ(group.codes.offset_bytes % kRegionAlignmentBytes, 0);
    }
  }
  EXPECT_EQ(layout.layer(0).page_bytes, 6 * 384);
  EXPECT_EQ(layout.layer(0).payload_bytes, 6 * 320);
  EXPECT_THAT(layout.marginal_payload_bytes_per_token(), DoubleEq(120));
  EXPECT_THAT(layout.marginal_bytes_per_token(), DoubleEq(144));
}

TEST(PageLayoutTest, TheKeysAndTheValuesOfEachLayerMayHaveTheirOwnNumberType) {
  const plan::AttentionShape shape = Shape(2, 1, 64);
  KvPlan plan = plan::FullRankPlan(shape, BF16);
  plan.mutable_layers(1)
      ->mutable_key()
      ->mutable_parts(0)
      ->mutable_codec()
      ->set_dtype(F32);
  plan.mutable_layers(1)
      ->mutable_value()
      ->mutable_parts(0)
      ->mutable_codec()
      ->set_dtype(F16);
  const PageLayout layout = LayOut(plan, shape, PageTokens(16));
  EXPECT_EQ(layout.layer(0).page_bytes, 16 * 64 * (2 + 2));
  EXPECT_EQ(layout.layer(1).page_bytes, 16 * 64 * (4 + 2));
  EXPECT_EQ(layout.layer(1).key.parts[0].dtype, F32);
  EXPECT_EQ(layout.layer(1).value.parts[0].dtype, F16);
  EXPECT_EQ(layout.page_groups().size(), 1u);
  EXPECT_EQ(layout.page_groups()[0].page_bytes, 16 * 64 * 10);
}

TEST(PageLayoutTest, LayersWithEqualWindowsShareAPageGroup) {
  plan::AttentionShape shape = Shape(4, 1, 64);
  shape.layers[1].sliding_window = 128;
  shape.layers[3].sliding_window = 128;
  const PageLayout layout =
      LayOut(plan::FullRankPlan(shape, BF16), shape, PageTokens(16));
  ASSERT_EQ(layout.page_groups().size(), 2u);
  EXPECT_THAT(layout.page_groups()[0].layers, ElementsAre(0, 2));
  EXPECT_THAT(layout.page_groups()[1].layers, ElementsAre(1, 3));
  EXPECT_EQ(layout.page_groups()[1].sliding_window, 128);
  EXPECT_EQ(layout.layer(3).page_group, PageGroupId(1));
}

TEST(PageLayoutTest, EachRankStoresOnlyItsOwnHeads) {
  const plan::AttentionShape shape = Shape(1, 4, 64);
  const plan::TpShard shard = {.rank = 1, .size = 2};
  const PageLayout layout =
      LayOut(plan::FullRankPlan(shape, BF16), shape, PageTokens(16), shard);
  EXPECT_EQ(layout.kv_heads(), (plan::HeadRange{2, 2}));
  EXPECT_THAT(layout.layer(0).key.parts[0].groups[0].heads, ElementsAre(2));
  EXPECT_EQ(layout.dense_bf16_bytes_per_token(), 2 * 2 * 64 * 2);
}

TEST(PageLayoutTest, AHeadIsReplicatedIfThereAreMoreRanksThanHeads) {
  const plan::AttentionShape shape = Shape(1, 2, 64);
  const plan::TpShard shard = {.rank = 3, .size = 4};
  const PageLayout layout =
      LayOut(plan::FullRankPlan(shape, BF16), shape, PageTokens(16), shard);
  EXPECT_EQ(layout.kv_heads(), (plan::HeadRange{1, 1}));
}

TEST(PageLayoutTest, RefusesRanksThatDoNotDivideTheHeads) {
  const plan::AttentionShape shape = Shape(1, 6, 64);
  const plan::TpShard shard = {.rank = 0, .size = 4};
  EXPECT_THAT(
      PageLayout::Create(plan::FullRankPlan(shape, BF16), shape, {}, shard),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("6 KV heads cannot be divided among 4")));
}

TEST(PageLayoutTest,
     ALowRankGroupThatSpansSeveralRanksIsReplicatedOnEachOfThem) {
  const plan::AttentionShape shape = Shape(1, 4, 64);
  const KvPlan plan = PlanWithKey(shape, R"({
      "low_rank":{"groups":[{"heads":[0,1,2,3],"rank":96}]},
      "uses":[{"reconstruct":{}}],"stored":"PRE_ROPE",
      "codec":{"dtype":"BF16"}})");
  const plan::TpShard shard = {.rank = 1, .size = 2};
  const PageLayout layout = LayOut(plan, shape, PageTokens(16), shard);
  ASSERT_EQ(layout.layer(0).key.parts[0].groups.size(), 1u);
  EXPECT_EQ(layout.layer(0).key.parts[0].groups[0].width, 96);
  EXPECT_THAT(layout.PayloadBytesPerToken(0, plan::Side::kKey), DoubleEq(192));
  EXPECT_THAT(layout.PayloadBytesPerToken(0, plan::Side::kValue),
              DoubleEq(256));
}

TEST(PageLayoutTest, ThePackedThreeBitCodesOfASlotTakeWholeBytes) {
  const plan::AttentionShape shape = Shape(1, 2, 64);
  const KvPlan plan = PlanWithKey(shape, R"({
      "low_rank":{"groups":[{"heads":[0],"rank":30},{"heads":[1],"rank":40}]},
      "uses":[{"reconstruct":{}}],"stored":"PRE_ROPE",
      "codec":{"bits":{"schedule":[3]},"per_token":{},"param_dtype":"F16"}})");
  const PageLayout layout = LayOut(plan, shape, PageTokens(16));
  const PartLayout& part = layout.layer(0).key.parts[0];
  // The codes of the first latent take 90 bits (12 bytes), those of the second
  // one 120 bits (15 bytes). Scale and minimum take 4 bytes.
  EXPECT_EQ(part.groups[0].codes.slot_bytes, 12);
  EXPECT_EQ(part.groups[1].codes.slot_bytes, 15);
  EXPECT_EQ(part.groups[0].params.slot_bytes, 4);
  EXPECT_THAT(layout.PayloadBytesPerToken(0, plan::Side::kKey),
              DoubleEq(12 + 15 + 8));
  // Padding enlarges the regions to a multiple of 128 bytes: codes of group 0
  // from 192 to 256, its params from 64 to 128, codes of group 1 from 240 to
  // 256, its params from 64 to 128.
  EXPECT_EQ(part.groups[1].codes.offset_bytes, 384);
  EXPECT_EQ(layout.layer(0).page_bytes, 768 + 2 * 2048);
}

TEST(PageLayoutTest, ChannelsOfZeroBitsInAScheduleTakeNoSpace) {
  const plan::AttentionShape shape = Shape(1, 2, 64);
  const KvPlan plan = PlanWithKey(shape, R"({
      "full":{},"stored":"PRE_ROPE","mean":true,
      "codec":{"bits":{"schedule":[8,4,4,2,0,0,0,0]},"channel_sequence":{},
               "param_dtype":"F16","basis_sequence":{}}})");
  const PageLayout layout = LayOut(plan, shape, PageTokens(16));
  const GroupLayout& group = layout.layer(0).key.parts[0].groups[0];
  EXPECT_THAT(group.heads, ElementsAre(0, 1));
  EXPECT_EQ(group.width, 128);
  EXPECT_EQ(group.codes.slot_bytes, 16 * (8 + 4 + 4 + 2) / 8);
  EXPECT_EQ(group.params.num_slots, 0);
  // A sequence has a basis of 64 stored channels times 128 numbers, a mean of
  // 128 numbers, and a scale and a minimum of each stored channel. Each number
  // has 2 bytes.
  EXPECT_EQ(layout.layer(0).sequence_bytes, 2 * (64 * 128 + 128 + 2 * 64));
  const int64_t side_pages =
      (layout.layer(0).sequence_bytes + layout.layer(0).page_bytes - 1) /
      layout.layer(0).page_bytes;
  EXPECT_EQ(layout.page_groups()[0].side_pages_per_sequence, side_pages);
  EXPECT_EQ(layout.fixed_bytes_per_sequence(),
            side_pages * layout.layer(0).page_bytes);
  EXPECT_EQ(layout.fixed_payload_bytes_per_sequence(),
            layout.layer(0).sequence_bytes);
  EXPECT_FALSE(layout.prefix_reusable());
}

TEST(PageLayoutTest, RefusesARankWhoseChannelsDoNotDivideIntoEqualRuns) {
  const plan::TpShard shard = {.rank = 1, .size = 2};
  const plan::AttentionShape narrow =
      Shape(1, 4, 10);  // 40 channels, 20 on a rank
  const KvPlan schedule = PlanWithKey(narrow, R"({
      "full":{},"stored":"PRE_ROPE","mean":true,
      "codec":{"bits":{"schedule":[8,4,4,2,0,0,0,0]},"channel_sequence":{},
               "param_dtype":"F16","basis_sequence":{}}})");
  KVASIR_EXPECT_OK(PageLayout::Create(schedule, narrow, PageTokens(16)));
  EXPECT_THAT(
      PageLayout::Create(schedule, narrow, PageTokens(16), shard),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("layer 0 key part 0: the 20 channels of rank 1 of 2 "
                         "do not divide into 8 runs")));
  const plan::AttentionShape odd =
      Shape(1, 2, 24);  // 48 channels, 24 on a rank
  const KvPlan ranges = PlanWithKey(odd, R"({
      "full":{},"stored":"PRE_ROPE","mean":true,
      "codec":{"bits":{"schedule":[4]},"per_token":{"group":16},
               "param_dtype":"F16","basis_sequence":{}}})");
  KVASIR_EXPECT_OK(PageLayout::Create(ranges, odd, PageTokens(16)));
  EXPECT_THAT(PageLayout::Create(ranges, odd, PageTokens(16), shard),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("the 24 channels of rank 1 of 2 do not divide "
                                 "into 1 runs of whole ranges of 16")));
}

TEST(PageLayoutTest, EvictionLimitsTheNumberOfPagesOfALongSequence) {
  const plan::AttentionShape shape = Shape(2, 2, 64);
  KvPlan plan = plan::FullRankPlan(shape, BF16);
  auto* eviction = plan.mutable_layers(0)->mutable_eviction();
  eviction->set_budget(128);
  eviction->set_recent(32);
  eviction->set_every_tokens(16);
  eviction->set_positions(kvasir::v1::Eviction::ORIGINAL);
  const PageLayout layout = LayOut(plan, shape, PageTokens(16));
  const PageGroupId evicting = layout.layer(0).page_group;
  const PageGroupId keeping = layout.layer(1).page_group;
  EXPECT_EQ(layout.PagesHeld(evicting, 100, 64), 7);
  EXPECT_EQ(layout.PagesHeld(evicting, 144, 64), 9);
  EXPECT_EQ(layout.PagesHeld(evicting, 1 << 20, 64), 9);  // 128 + 16 slots
  EXPECT_EQ(layout.PagesHeld(keeping, 1 << 20, 64), (1 << 20) / 16);
  EXPECT_EQ(layout.BytesAtLength(1 << 20, 64) - layout.BytesAtLength(144, 64),
            ((1 << 20) / 16 - 9) * layout.layer(1).page_bytes);
}

TEST(PageLayoutTest, AKeptRopePairAndAComplexChannelTakeTwoNumbersEach) {
  const plan::AttentionShape shape = Shape(1, 2, 8);
  const KvPlan pairs = PlanWithKey(shape, R"({
      "rope_pairs":{"per_head":[{"pair_indices":[0,2,3]},
                                {"pair_indices":[0,1,2]}]},
      "uses":[{"fold":{}}],"stored":"POST_ROPE","codec":{"dtype":"BF16"}})");
  EXPECT_THAT(LayOut(pairs, shape, PageTokens(16))
                  .PayloadBytesPerToken(0, plan::Side::kKey),
              DoubleEq(2 * 6 * 2));
  const KvPlan commuting = PlanWithKey(shape, R"({
      "rope_low_rank":{"groups":[{"heads":[0,1],"pairs":[0,1,3],
                                  "rank_per_pair":[2,1,1]}]},
      "uses":[{"at_runtime":{}}],"stored":"POST_ROPE",
      "codec":{"dtype":"BF16"}})");
  EXPECT_THAT(LayOut(commuting, shape, PageTokens(16))
                  .PayloadBytesPerToken(0, plan::Side::kKey),
              DoubleEq(2 * 4 * 2));
}

TEST(PageLayoutTest, TheSizeIncludesExactWindowsLandmarksAndSlotMetadata) {
  const plan::AttentionShape shape = Shape(1, 2, 64);
  KvPlan plan = PlanWithKey(shape, R"({
      "full":{},"stored":"POST_ROPE",
      "codec":{"bits":{"schedule":[4]},"per_token":{},"param_dtype":"F16"}})");
  plan.mutable_layers(0)->mutable_key()->set_exact_window(32);
  auto* eviction = plan.mutable_layers(0)->mutable_eviction();
  eviction->set_budget(128);
  eviction->set_recent(32);
  eviction->set_every_tokens(16);
  eviction->set_positions(kvasir::v1::Eviction::ORIGINAL);
  auto* selection = plan.mutable_layers(0)->mutable_selection();
  selection->set_chunk_slots(8);
  selection->set_budget(64);
  selection->mutable_landmark_codec()->set_dtype(BF16);
  const PageLayout layout = LayOut(plan, shape, PageTokens(16));
  const LayerLayout& layer = layout.layer(0);
  EXPECT_EQ(layer.sequence_bytes, 32 * 2 * 64 * 2);
  EXPECT_EQ(layer.landmarks.num_slots, 2);
  EXPECT_EQ(layer.landmarks.slot_bytes, 2 * 64 * 2);
  // The metadata of two units, 9 bytes each, would exceed 5 % of a token's 2 *
  // (32 + 4) + 256 bytes. So the layer has one unit.
  EXPECT_EQ(layer.slot_metadata.num_units, 1);
  EXPECT_EQ(layer.slot_metadata.size_bytes(), 16 * (4 + 4 + 1));
  EXPECT_FALSE(layout.prefix_reusable());
}

TEST(PageLayoutTest, SlotMetadataLiesInAlignedRegionsAfterTheTiles) {
  const plan::AttentionShape shape = Shape(1, 4, 64);
  KvPlan plan = PlanWithKey(shape, R"({
      "full":{},"stored":"POST_ROPE",
      "codec":{"bits":{"schedule":[4]},"per_token":{},"param_dtype":"F16"}})");
  kvasir::v1::Eviction* eviction = plan.mutable_layers(0)->mutable_eviction();
  eviction->set_budget(128);
  eviction->set_recent(32);
  eviction->set_every_tokens(16);
  eviction->set_positions(kvasir::v1::Eviction::ORIGINAL);
  for (const std::vector<uint32_t>& heads :
       {std::vector<uint32_t>{0}, {1}, {2, 3}}) {
    eviction->add_units()->mutable_heads()->Add(heads.begin(), heads.end());
  }
  for (const int64_t page_tokens : {16, 64, 192}) {
    const LayerLayout layer =
        LayOut(plan, shape, PageTokens(page_tokens)).layer(0);
    const SlotMetadataLayout& slots = layer.slot_metadata;
    const int64_t tiles = (page_tokens + 63) / 64 * layer.tile_bytes;
    EXPECT_EQ(slots.num_units, 3);
    EXPECT_EQ(slots.scores, (Region{tiles, 4, 4, 3 * page_tokens}));
    const int64_t words = AlignRegion(3 * page_tokens * 4);
    EXPECT_EQ(slots.positions, (Region{tiles + words, 4, 4, 3 * page_tokens}));
    EXPECT_EQ(slots.key_errors,
              (Region{tiles + 2 * words, 1, 1, 3 * page_tokens}));
    EXPECT_EQ(slots.value_errors, Region());  // values are not quantized
    EXPECT_EQ(layer.page_bytes,
              tiles + 2 * words + AlignRegion(3 * page_tokens));
    // For each token, a head has 32 + 4 bytes of keys and 128 bytes of values,
    // and an eviction unit has 9 bytes.
    EXPECT_EQ(layer.payload_bytes,
              page_tokens * (4 * (36 + 128) + 3 * (4 + 4 + 1)));
  }
  // The second rank holds heads 2 and 3, which form one eviction unit.
  const LayerLayout rank =
      LayOut(plan, shape, PageTokens(64), {.rank = 1, .size = 2}).layer(0);
  EXPECT_EQ(rank.slot_metadata.num_units, 1);
  plan.mutable_layers(0)->clear_eviction();
  const LayerLayout without = LayOut(plan, shape, PageTokens(64)).layer(0);
  EXPECT_EQ(without.slot_metadata.num_units, 0);
  EXPECT_EQ(without.page_bytes, without.tile_bytes);
}

// Metadata has quantization errors only for sides that store codes. The size
// that ResolvedPlan states must equal the size in the page.
TEST(PageLayoutTest, SlotMetadataTakesAsManyBytesAsTheResolvedPlanStates) {
  const plan::AttentionShape shape = Shape(1, 2, 64);
  const std::string codes =
      R"("codec":{"bits":{"schedule":[4]},"per_token":{},"param_dtype":"F16"})";
  const std::string numbers = R"("codec":{"dtype":"BF16"})";
  for (const bool coded_keys : {false, true}) {
    for (const bool coded_values : {false, true}) {
      const auto side = [&](const char* stored, bool coded) {
        return absl::StrCat(R"({"full":{},"stored":")", stored, R"(",)",
                            coded ? codes : numbers, "}");
      };
      KvPlan plan = PlanWithKey(shape, side("POST_ROPE", coded_keys));
      *plan.mutable_layers(0)->mutable_value() =
          PlanWithKey(shape, side("NO_ROPE", coded_values)).layers(0).key();
      auto* eviction = plan.mutable_layers(0)->mutable_eviction();
      eviction->set_budget(128);
      eviction->set_recent(32);
      eviction->set_every_tokens(16);
      eviction->set_positions(kvasir::v1::Eviction::ORIGINAL);
      for (const uint32_t head : {0u, 1u}) {
        eviction->add_units()->add_heads(head);
      }
      const PageLayout layout = LayOut(plan, shape, PageTokens(64));
      const auto resolved = plan::ResolvePlan(plan, shape);
      KVASIR_ASSERT_OK(resolved);
      const int64_t unit_bytes =
          plan::EvictionUnitBytes(resolved->attention_of(0));
      EXPECT_EQ(unit_bytes, 8 + (coded_keys ? 1 : 0) + (coded_values ? 1 : 0));
      EXPECT_EQ(layout.layer(0).slot_metadata.size_bytes(),
                64 * 2 * unit_bytes);
    }
  }
}

bool IsOfKeys(const SideLayout& side) {
  return !side.parts.empty() && side.parts.front().of_keys;
}

// The place of an exact row, computed like in kernels::ExactSlots.
struct RowPlace {
  int64_t layer = 0;  // the layer whose arena holds the row
  int64_t page = 0;   // index among the sequence's side pages
  int64_t offset_bytes = 0;
};
RowPlace PlaceOfRow(const ExactRing& ring, int64_t row) {
  auto at = ring.segments.begin();
  while (row >= at->first_row + at->num_rows) ++at;
  const int64_t in_segment = row - at->first_row;
  return {at->layer, at->first_page + in_segment / at->rows_per_page,
          at->offset_bytes + in_segment % at->rows_per_page * ring.row_bytes};
}
RowPlace PlaceOfToken(const ExactRing& ring, int64_t position) {
  const int64_t sinks = ring.sink_tokens;
  return PlaceOfRow(
      ring, position < sinks ? position
                             : sinks + (position - sinks) % ring.window_tokens);
}

// Checks that every exact row lies in side pages of its page group and overlaps
// no other row.
void ExpectRowsHavePlaces(const std::vector<LayerLayout>& layers) {
  struct Bytes {
    int64_t begin;
    int64_t end;
  };
  std::map<std::pair<int64_t, int64_t>, std::vector<Bytes>> taken;
  for (const LayerLayout& layer : layers) {
    for (const SideLayout* side : {&layer.key, &layer.value}) {
      const ExactRing& ring = side->exact;
      EXPECT_LE(ring.segments.size(), kMostExactSegments);
      if (IsOfKeys(*side)) continue;
      for (int64_t row = 0; row < ring.tokens(); ++row) {
        const RowPlace place = PlaceOfRow(ring, row);
        const LayerLayout& host = layers[static_cast<size_t>(place.layer)];
        EXPECT_EQ(host.page_group, layer.page_group);
        EXPECT_LT(place.page, host.side_pages);
        EXPECT_GE(place.offset_bytes, 0);
        EXPECT_LE(place.offset_bytes + ring.row_bytes, host.page_bytes);
        taken[{place.layer, place.page}].push_back(
            {place.offset_bytes, place.offset_bytes + ring.row_bytes});
      }
    }
  }
  for (auto& [page, rows] : taken) {
    std::sort(rows.begin(), rows.end(),
              [](const Bytes& a, const Bytes& b) { return a.begin < b.begin; });
    for (size_t i = 1; i < rows.size(); ++i) {
      EXPECT_GE(rows[i].begin, rows[i - 1].end)
          << "arena " << page.first << ", side page " << page.second;
    }
  }
}
void ExpectRowsHavePlaces(const PageLayout& layout) {
  ExpectRowsHavePlaces(layout.layers());
  for (const LayerLayout& layer : layout.layers()) {
    for (const SideLayout* side : {&layer.key, &layer.value}) {
      const ExactRing& ring = side->exact;
      int64_t width = 0;
      for (const PartLayout& part : side->parts) {
        for (const GroupLayout& group : part.groups) {
          if (!ring.any()) continue;
          EXPECT_EQ(group.exact_offset_bytes, 2 * width);
          width += group.stored_width;
        }
      }
      EXPECT_EQ(ring.row_bytes, 2 * width);
    }
    EXPECT_LE(layer.side_pages,
              layout.page_group(layer.page_group).side_pages_per_sequence);
  }
}

TEST(PageLayoutTest, ExactRowsOfAWindowAreStoredInSidePages) {
  const plan::AttentionShape shape = Shape(1, 4, 64);
  KvPlan plan = PlanWithKey(shape, R"({
      "low_rank":{"groups":[{"heads":[0,2],"rank":48},
                            {"heads":[1,3],"rank":16}]},
      "uses":[{"reconstruct":{}}],"stored":"PRE_ROPE",
      "codec":{"bits":{"schedule":[8,4,4,2,0,0,0,0]},"per_token":{},
               "param_dtype":"F16"}})");
  auto* value = plan.mutable_layers(0)->mutable_value();
  auto* codec = value->mutable_parts(0)->mutable_codec();
  codec->mutable_bits()->add_schedule(3);
  codec->mutable_per_token();
  codec->set_param_dtype(F16);
  value->set_exact_window(100);
  for (const uint32_t key_window : {0u, 1u, 7u, 64u, 1000u}) {
    plan.mutable_layers(0)->mutable_key()->set_exact_window(key_window);
    for (const int64_t page_tokens : {16, 32, 64}) {
      const PageLayout layout = LayOut(plan, shape, PageTokens(page_tokens));
      const LayerLayout& layer = layout.layer(0);
      ExpectRowsHavePlaces(layout);
      if (key_window > 0) {
        // Exact rows contain only the channels whose codes have bits: half
        // of them.
        EXPECT_EQ(layer.key.parts[0].groups[0].stored_width, 24);
        EXPECT_EQ(layer.key.parts[0].groups[1].stored_width, 8);
      }
      EXPECT_EQ(layout.page_groups()[0].side_pages_per_sequence,
                layer.side_pages);
      EXPECT_EQ(layer.sequence_bytes, 2 * (32 * key_window + 256 * 100));
      EXPECT_LE(layer.sequence_bytes, layout.fixed_bytes_per_sequence());
      EXPECT_TRUE(layout.prefix_reusable());
    }
  }
}

KvPlan PlanOfCodes(const plan::AttentionShape& shape) {
  return PlanWithKey(shape, R"({
      "full":{},"stored":"POST_ROPE",
      "codec":{"bits":{"schedule":[4]},"per_token":{},"param_dtype":"F16"}})");
}

TEST(PageLayoutTest, ExactRowsOfSinksAreStoredBeforeTheRingOfRecentTokens) {
  const plan::AttentionShape shape = Shape(1, 2, 64);
  KvPlan plan = PlanOfCodes(shape);
  auto* layer = plan.mutable_layers(0);
  *layer->mutable_value()->mutable_parts(0)->mutable_codec() =
      layer->key().parts(0).codec();
  layer->set_exact_sinks(4);
  layer->mutable_key()->set_exact_window(20);
  const PageLayout layout = LayOut(plan, shape, PageTokens(16));
  const LayerLayout& laid = layout.layer(0);
  // In a page of 16 tokens, each side has two heads, each with 64 4-bit codes
  // and 4 bytes of range a token. With padding that is 2 * (512 + 128) bytes.
  EXPECT_EQ(laid.page_bytes, 2 * 2 * 640);
  // An exact row has 256 bytes, so ten rows fit into a page.
  EXPECT_EQ(laid.key.exact,
            (ExactRing{.sink_tokens = 4,
                       .window_tokens = 20,
                       .row_bytes = 256,
                       .segments = {{.num_rows = 24, .rows_per_page = 10}}}));
  // The rows of the values' sinks are in the last page of the keys' rows, which
  // the keys' rows fill only partly.
  EXPECT_EQ(laid.value.exact, (ExactRing{.sink_tokens = 4,
                                         .window_tokens = 0,
                                         .row_bytes = 256,
                                         .segments = {{.num_rows = 4,
                                                       .first_page = 2,
                                                       .offset_bytes = 4 * 256,
                                                       .rows_per_page = 4}}}));
  ExpectRowsHavePlaces(layout);
  EXPECT_EQ(laid.side_pages, 3);
  EXPECT_EQ(laid.sequence_bytes, (24 + 4) * 256);
  EXPECT_EQ(layout.fixed_payload_bytes_per_sequence(), 28 * 256);
  EXPECT_EQ(layout.fixed_bytes_per_sequence(), 3 * 2 * 2 * 640);
  EXPECT_TRUE(layout.prefix_reusable());

  const auto place = [](const ExactRing& ring, int64_t position) {
    const RowPlace at = PlaceOfToken(ring, position);
    return std::pair<int64_t, int64_t>(at.page, at.offset_bytes / 256);
  };
  using At = std::pair<int64_t, int64_t>;
  EXPECT_EQ(place(laid.key.exact, 0), At(0, 0));
  EXPECT_EQ(place(laid.key.exact, 3), At(0, 3));
  EXPECT_EQ(place(laid.key.exact, 4), At(0, 4));
  EXPECT_EQ(place(laid.key.exact, 23), At(2, 3));
  // the ring begins after the rows of the sinks
  EXPECT_EQ(place(laid.key.exact, 24), At(0, 4));
  EXPECT_EQ(place(laid.key.exact, 4 + 20 * 1000 + 7), At(1, 1));
  EXPECT_EQ(place(laid.value.exact, 3), At(2, 7));
}

TEST(PageLayoutTest, KeysOrValuesThatAreNotQuantizedNeedNoExactRowsForSinks) {
  const plan::AttentionShape shape = Shape(1, 2, 64);
  KvPlan plan = PlanOfCodes(shape);
  plan.mutable_layers(0)->set_exact_sinks(4);
  const PageLayout layout = LayOut(plan, shape, PageTokens(16));
  EXPECT_EQ(layout.layer(0).sequence_bytes, 4 * 256);
  EXPECT_TRUE(layout.layer(0).key.exact.any());
  EXPECT_FALSE(layout.layer(0).value.exact.any());
  EXPECT_TRUE(layout.prefix_reusable());
}

constexpr char kKeyAndValue[] = R"({
      "low_rank":{"groups":[{"heads":[0,2],"rank":48},
                            {"heads":[1,3],"rank":16}]},
      "uses":[{"reconstruct":{},"serves":"SERVES_KEY"},
              {"at_runtime":{},"serves":"SERVES_VALUE"}],"stored":"PRE_ROPE",
      "codec":{"bits":{"schedule":[8,4,4,2,0,0,0,0]},"per_token":{},
               "param_dtype":"F16"}})";

KvPlan PlanOfKeyAndValue(int64_t exact_window) {
  absl::StatusOr<KvPlan> plan = plan::ParsePlanJson(
      absl::StrCat(R"({"schema_version":1,"layers":[{"key":{"exact_window":)",
                   exact_window, R"(},"value":{"exact_window":)", exact_window,
                   R"(},"joint":[)", kKeyAndValue, "]}]}"),
      "test");
  KVASIR_EXPECT_OK(plan);
  return *std::move(plan);
}

TEST(PageLayoutTest, AJointLatentOfKeyAndValueIsStoredOnce) {
  const plan::AttentionShape shape = Shape(1, 4, 64);
  const PageLayout layout = LayOut(PlanOfKeyAndValue(0), shape, PageTokens(64));
  const LayerLayout& layer = layout.layer(0);
  // A token has two latents. The first one has 6 channels of 8 bits, 12 of 4
  // and 6 of 2. Its codes take 14 bytes, and its four ranges 16 bytes. The
  // second one has a third of the channels: 5 bytes of codes, and 16 bytes for
  // its four ranges.
  EXPECT_EQ(layer.payload_bytes, 64 * (14 + 16 + 5 + 16));
  EXPECT_EQ(layout.PayloadBytesPerToken(0, plan::Side::kKey), 51);
  EXPECT_EQ(layout.PayloadBytesPerToken(0, plan::Side::kValue), 0);
  ASSERT_EQ(layer.value.parts.size(), 1);
  EXPECT_TRUE(layer.value.parts[0].of_keys);
  EXPECT_FALSE(layer.key.parts[0].of_keys);
  for (size_t g = 0; g < 2; ++g) {
    const GroupLayout& key = layer.key.parts[0].groups[g];
    const GroupLayout& value = layer.value.parts[0].groups[g];
    EXPECT_EQ(value.codes, key.codes);
    EXPECT_EQ(value.params, key.params);
  }
  EXPECT_EQ(layer.side_pages, 0);
}

TEST(PageLayoutTest, AJointLatentOfKeyAndValueHasOneRingOfExactRows) {
  const plan::AttentionShape shape = Shape(1, 4, 64);
  for (const int64_t window : {1, 100, 1000}) {
    const PageLayout layout =
        LayOut(PlanOfKeyAndValue(window), shape, PageTokens(32));
    const LayerLayout& layer = layout.layer(0);
    ExpectRowsHavePlaces(layout);
    EXPECT_EQ(layer.value.exact, layer.key.exact);
    EXPECT_EQ(layer.value.parts[0].groups[1].exact_offset_bytes, 2 * 24);
    EXPECT_EQ(layer.side_pages,
              (64 * window + layer.page_bytes - 1) / layer.page_bytes);
    EXPECT_EQ(layer.sequence_bytes, 2 * 32 * window);
  }
}

TEST(PageLayoutTest, AllRanksReserveTheSameNumberOfSidePages) {
  const plan::AttentionShape shape = Shape(1, 4, 64);
  KvPlan plan = PlanWithKey(shape, R"({
      "low_rank":{"groups":[{"heads":[0,1],"rank":128},
                            {"heads":[2,3],"rank":8}]},
      "uses":[{"reconstruct":{}}],"stored":"PRE_ROPE",
      "codec":{"bits":{"schedule":[1]},"per_token":{},"param_dtype":"F16"}})");
  plan.mutable_layers(0)->mutable_key()->set_exact_window(200);
  std::vector<int64_t> own;
  std::vector<int64_t> granted;
  for (int64_t rank = 0; rank < 2; ++rank) {
    const plan::TpShard shard = {.rank = rank, .size = 2};
    const PageLayout layout = LayOut(plan, shape, PageTokens(16), shard);
    own.push_back(layout.layer(0).side_pages);
    granted.push_back(layout.page_groups()[0].side_pages_per_sequence);
  }
  EXPECT_NE(own[0], own[1]);
  EXPECT_EQ(granted[0], std::max(own[0], own[1]));
  EXPECT_EQ(granted[1], granted[0]);
}

KvPlan PlanOfWidths(const std::vector<int>& bits, int64_t exact_window) {
  KvPlan plan;
  plan.set_schema_version(1);
  for (const int width : bits) {
    auto* layer = plan.add_layers();
    for (auto* side : {layer->mutable_key(), layer->mutable_value()}) {
      side->set_exact_window(static_cast<uint32_t>(exact_window));
      auto* part = side->add_parts();
      part->mutable_full();
      part->set_stored(kvasir::v1::NO_ROPE);
      auto* codec = part->mutable_codec();
      codec->mutable_bits()->add_schedule(static_cast<uint32_t>(width));
      codec->mutable_channel_static();
    }
    layer->mutable_key()->mutable_parts(0)->set_stored(kvasir::v1::POST_ROPE);
  }
  return plan;
}

TEST(PageLayoutTest,
     ExactRowsOfALayerWithFewBitsAreStoredInTheArenaOfAnotherLayer) {
  const plan::AttentionShape shape = Shape(2, 1, 128);
  const PageLayout layout =
      LayOut(PlanOfWidths({1, 8}, 32), shape, PageTokens(16));
  // The pages of the two layers have 512 and 4096 bytes. A row has 256 bytes,
  // so a page holds 2 or 16 rows.
  EXPECT_EQ(layout.layer(0).page_bytes, 2 * 256);
  EXPECT_EQ(layout.layer(1).page_bytes, 2 * 2048);
  ExpectRowsHavePlaces(layout);
  for (int64_t l = 0; l < 2; ++l) {
    for (const auto* side : {&layout.layer(l).key, &layout.layer(l).value}) {
      ASSERT_EQ(side->exact.segments.size(), 1);
      EXPECT_EQ(side->exact.segments[0].layer, 1);
    }
  }
  EXPECT_EQ(layout.layer(0).side_pages, 0);
  // Layer 0's rows would take 16 pages for each side in its own arena.
  EXPECT_EQ(layout.page_groups()[0].side_pages_per_sequence, 8);
  // Layer 0's page is too small for a row. It is not enlarged, because layer
  // 1's page holds the row.
  const plan::AttentionShape wide = Shape(2, 1, 512);
  const PageLayout shared =
      LayOut(PlanOfWidths({1, 8}, 4), wide, PageTokens(1));
  EXPECT_EQ(shared.layer(0).page_bytes, 2 * 128);
  EXPECT_EQ(shared.layer(1).page_bytes, 2 * 512);
  ExpectRowsHavePlaces(shared);
}

// The layers are those of the test above. Here, the rows completely fill eight
// side pages in both arenas.
TEST(PageLayoutTest, ARingOfExactRowsMayUseTheFreeSpaceOfTwoLayersArenas) {
  const plan::AttentionShape shape = Shape(2, 1, 128);
  const PageLayout layout =
      LayOut(PlanOfWidths({1, 8}, 36), shape, PageTokens(16));
  ExpectRowsHavePlaces(layout);
  EXPECT_EQ(layout.page_groups()[0].side_pages_per_sequence, 8);
  EXPECT_EQ(layout.layer(0).key.exact,
            (ExactRing{.window_tokens = 36,
                       .row_bytes = 256,
                       .segments = {{.num_rows = 16, .rows_per_page = 2},
                                    {.layer = 1,
                                     .first_row = 16,
                                     .num_rows = 8,
                                     .first_page = 4,
                                     .offset_bytes = 8 * 256,
                                     .rows_per_page = 8},
                                    {.layer = 1,
                                     .first_row = 24,
                                     .num_rows = 12,
                                     .first_page = 5,
                                     .rows_per_page = 16}}}));
}

// The number of side pages that a sequence would need if each side's exact rows
// were in whole pages of a single arena.
int64_t SidePagesOfWholeRings(const std::vector<LayerLayout>& layers) {
  std::vector<const SideLayout*> sides;
  for (const LayerLayout& layer : layers) {
    for (const SideLayout* side : {&layer.key, &layer.value}) {
      if (side->exact.any() && !IsOfKeys(*side)) sides.push_back(side);
    }
  }
  std::stable_sort(sides.begin(), sides.end(),
                   [](const auto* a, const auto* b) {
                     return a->exact.tokens() * a->exact.row_bytes >
                            b->exact.tokens() * b->exact.row_bytes;
                   });
  std::vector<int64_t> ends(layers.size());
  for (const SideLayout* side : sides) {
    const ExactRing& ring = side->exact;
    size_t best = ends.size();
    int64_t earliest = 0;
    for (size_t l = 0; l < ends.size(); ++l) {
      const int64_t rows = layers[l].page_bytes / ring.row_bytes;
      if (rows == 0) continue;
      const int64_t end = ends[l] + (ring.tokens() + rows - 1) / rows;
      if (best == ends.size() || end < earliest) {
        best = l;
        earliest = end;
      }
    }
    ends[best] = earliest;
  }
  return *std::max_element(ends.begin(), ends.end());
}

// Checks that side pages waste few bytes: at most one page in every arena, and
// in addition a tenth of the bytes of exact rows. If pages have fewer than 64
// slots, they hold few rows, and an eighth is allowed.
void ExpectLittleWaste(const PageLayout& layout) {
  ExpectRowsHavePlaces(layout);
  const PageGroupLayout& group = layout.page_groups()[0];
  const int64_t rows_bytes = layout.fixed_payload_bytes_per_sequence();
  const int64_t waste =
      layout.fixed_bytes_per_sequence() - rows_bytes - group.page_bytes;
  EXPECT_LE(waste, rows_bytes / (layout.page_tokens() < 64 ? 8 : 10));
  EXPECT_LE(group.side_pages_per_sequence,
            SidePagesOfWholeRings(layout.layers()));
}

// Pairs of a number of channels and the bits of each channel.
using Runs = std::vector<std::pair<int, int>>;

// Channel runs for a side of 3 heads of 64 dimensions. They are as unequal as a
// planner makes them: a token takes 3 to 192 bytes, and some channels have 0
// bits.
Runs RandomRuns(std::mt19937_64* random) {
  static const std::vector<Runs> kRuns = {
      {{192, 1}},
      {{192, 2}},
      {{192, 4}},
      {{192, 8}},
      {{24, 1}, {168, 0}},
      {{64, 2}, {128, 1}},
      {{64, 2}, {72, 1}, {56, 0}},
      {{16, 4}, {48, 3}, {64, 2}, {40, 1}, {24, 0}},
      {{16, 5}, {64, 4}, {80, 3}, {32, 2}},
      {{8, 8}, {40, 6}, {64, 5}, {80, 4}}};
  return kRuns[(*random)() % kRuns.size()];
}

void SetRuns(const Runs& runs, int64_t heads, kvasir::v1::Part* part) {
  part->clear_low_rank();
  part->clear_codec();
  auto* group = part->mutable_low_rank()->add_groups();
  for (int64_t h = 0; h < heads; ++h) {
    group->add_heads(static_cast<uint32_t>(h));
  }
  auto* codec = part->mutable_codec();
  codec->mutable_channel_static();
  uint32_t rank = 0;
  for (const auto& [channels, bits] : runs) {
    auto* run = codec->mutable_bits()->add_runs();
    run->set_channels(static_cast<uint32_t>(channels));
    run->set_bits(static_cast<uint32_t>(bits));
    rank += static_cast<uint32_t>(channels);
  }
  group->set_rank(rank);
}

struct ExactTokens {
  int64_t window = 0;
  int64_t sinks = 0;
};

KvPlan PlanOfUnequalLayers(int64_t layers, int64_t heads, ExactTokens exact,
                           std::mt19937_64* random) {
  KvPlan plan;
  plan.set_schema_version(1);
  for (int64_t l = 0; l < layers; ++l) {
    auto* layer = plan.add_layers();
    layer->set_exact_sinks(static_cast<uint32_t>(exact.sinks));
    for (auto* side : {layer->mutable_key(), layer->mutable_value()}) {
      side->set_exact_window(static_cast<uint32_t>(exact.window));
      SetRuns(RandomRuns(random), heads, side->add_parts());
    }
    auto* key = layer->mutable_key()->mutable_parts(0);
    key->set_stored(kvasir::v1::PRE_ROPE);
    key->add_uses()->mutable_reconstruct();
    auto* value = layer->mutable_value()->mutable_parts(0);
    value->set_stored(kvasir::v1::NO_ROPE);
    value->add_uses()->mutable_at_runtime();
  }
  return plan;
}

TEST(PageLayoutTest, ExactRowsOfUnequalLayersWasteLittleSpace) {
  for (const uint64_t seed : {1, 2, 3, 4, 5, 6, 7, 8}) {
    for (const int64_t window : {8, 32, 128}) {
      for (const int64_t sinks : {0, 4}) {
        std::mt19937_64 random(seed);
        const KvPlan plan =
            PlanOfUnequalLayers(30, 3, {window, sinks}, &random);
        for (const int64_t granule : {1, 16}) {
          for (const int64_t page_tokens : {16, 64, 128}) {
            SCOPED_TRACE(absl::StrCat("seed ", seed, ", window ", window,
                                      ", sinks ", sinks, ", granule ", granule,
                                      ", pages of ", page_tokens));
            ExpectLittleWaste(
                LayOut(plan, Shape(30, 3, 64),
                       {.page_tokens = page_tokens, .granule_bytes = granule}));
          }
        }
      }
    }
  }
}

// The rows of each rank are placed separately. All ranks then reserve as many
// side pages as the rank that needs most.
TEST(PageLayoutTest, ExactRowsWasteLittleSpaceOnEveryRank) {
  const KvPlan plan = PlanOfWidths({1, 8, 2, 4, 1, 1, 3, 2, 2, 8}, 128);
  std::vector<int64_t> granted;
  for (int64_t rank = 0; rank < 2; ++rank) {
    const PageLayout layout = LayOut(plan, Shape(10, 4, 64), PageTokens(64),
                                     {.rank = rank, .size = 2});
    ExpectLittleWaste(layout);
    granted.push_back(layout.page_groups()[0].side_pages_per_sequence);
  }
  EXPECT_EQ(granted[0], granted[1]);
}

TEST(PageLayoutTest, ExactRowsOfJointPartsOfDifferentWidthsHaveLittlePadding) {
  std::mt19937_64 random(3);
  for (const int64_t window : {8, 32, 128}) {
    KvPlan plan;
    plan.set_schema_version(1);
    for (int l = 0; l < 30; ++l) {
      auto* layer = plan.add_layers();
      *layer = PlanOfKeyAndValue(window).layers(0);
      SetRuns(RandomRuns(&random), 4, layer->mutable_joint(0));
    }
    ExpectLittleWaste(LayOut(plan, Shape(30, 4, 64), PageTokens(64)));
  }
}

// Regression test: the greedy filling fails with 60 pages but succeeds with 46,
// so bisection by itself returned more pages than necessary.
TEST(ExactRowsTest, FindsAPlacementWithFewerSidePagesThanBisectionFinds) {
  struct Rows {
    int64_t tokens;
    int64_t row_bytes;
  };
  struct Case {
    std::vector<int64_t> page_bytes;  // indexed by layer
    std::vector<Rows> keys;
    std::vector<Rows> values;
    int64_t side_pages;
  };
  for (const Case& each :
       {Case{{384, 640}, {{0, 0}, {44, 274}}, {{44, 318}, {48, 326}}, 46},
        Case{{512, 768},
             {{181, 192}, {181, 416}},
             {{181, 256}, {181, 224}},
             174},
        Case{
            {896, 1024}, {{28, 388}, {32, 242}}, {{28, 512}, {32, 384}}, 28}}) {
    std::vector<LayerLayout> layers(2);
    for (size_t l = 0; l < 2; ++l) {
      layers[l].page_group = PageGroupId(0);
      layers[l].page_bytes = each.page_bytes[l];
      layers[l].key.exact.window_tokens = each.keys[l].tokens;
      layers[l].key.exact.row_bytes = each.keys[l].row_bytes;
      layers[l].value.exact.window_tokens = each.values[l].tokens;
      layers[l].value.exact.row_bytes = each.values[l].row_bytes;
    }
    PlaceExactRows({0, 1}, layers);
    ExpectRowsHavePlaces(layers);
    const int64_t side_pages =
        std::max(layers[0].side_pages, layers[1].side_pages);
    EXPECT_EQ(side_pages, each.side_pages);
    EXPECT_LE(side_pages, SidePagesOfWholeRings(layers));
  }
}

TEST(PageLayoutTest, APageIsEnlargedUntilAnExactRowFitsIntoIt) {
  const plan::AttentionShape shape = Shape(1, 1, 128);
  KvPlan plan = PlanWithKey(shape, R"({
      "full":{},"stored":"POST_ROPE",
      "codec":{"bits":{"schedule":[1]},"channel_static":{}}})");
  auto* value = plan.mutable_layers(0)->mutable_value();
  *value->mutable_parts(0)->mutable_codec() =
      plan.layers(0).key().parts(0).codec();
  value->set_exact_window(4);
  const LayerLayout fits = LayOut(plan, shape, PageTokens(16)).layer(0);
  EXPECT_EQ(fits.page_bytes, 2 * 256);
  EXPECT_EQ(fits.value.exact.segments[0].rows_per_page, 2);
  // An exact row has 1024 bytes. The codes of each side take 64 bytes, padded
  // to 128.
  const plan::AttentionShape wide = Shape(1, 1, 512);
  const PageLayout of_wide = LayOut(plan, wide, PageTokens(1));
  const LayerLayout& filled = of_wide.layer(0);
  EXPECT_EQ(filled.page_bytes, 1024);
  EXPECT_EQ(filled.payload_bytes, 2 * 64);
  EXPECT_EQ(filled.tile_bytes, 2 * 128);
  EXPECT_EQ(filled.value.exact.segments[0].rows_per_page, 1);
  EXPECT_EQ(filled.side_pages, 4);
  ExpectRowsHavePlaces(of_wide);
}

TEST(PageLayoutTest, RefusesASelectionChunkThatDoesNotDivideThePage) {
  const plan::AttentionShape shape = Shape(1, 1, 64);
  KvPlan plan = plan::FullRankPlan(shape, BF16);
  auto* selection = plan.mutable_layers(0)->mutable_selection();
  selection->set_chunk_slots(12);
  selection->set_budget(64);
  selection->mutable_landmark_codec()->set_dtype(BF16);
  EXPECT_THAT(
      PageLayout::Create(plan, shape, PageTokens(16)),
      StatusIs(
          absl::StatusCode::kInvalidArgument,
          HasSubstr("cannot be divided into selection chunks of 12 slots")));
}

TEST(PageLayoutTest, SizesWhoseByteCountWouldOverflowAreRefused) {
  const plan::AttentionShape shape = Shape(512, 1 << 12, 1 << 12);
  EXPECT_THAT(PageLayout::Create(plan::FullRankPlan(shape, F32), shape,
                                 PageTokens(kMaxPageTokens)),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("takes more than")));
  const plan::AttentionShape small = Shape(1, 1, 64);
  KvPlan plan = PlanWithKey(small, R"({
      "full":{},"stored":"POST_ROPE",
      "codec":{"bits":{"schedule":[1]},"channel_static":{}}})");
  KvPlan sinks = plan;
  plan.mutable_layers(0)->mutable_key()->set_exact_window(
      std::numeric_limits<uint32_t>::max());
  sinks.mutable_layers(0)->set_exact_sinks(
      std::numeric_limits<uint32_t>::max());
  for (const KvPlan& hostile : {plan, sinks}) {
    EXPECT_THAT(PageLayout::Create(hostile, small, PageTokens(1)),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("takes more than")));
  }
}

TEST(PageLayoutTest, RefusesPageTokensOutOfRange) {
  const plan::AttentionShape shape = Shape(1, 1, 64);
  for (int64_t tokens : {int64_t{0}, kMaxPageTokens + 1}) {
    EXPECT_THAT(
        PageLayout::Create(plan::FullRankPlan(shape, BF16), shape,
                           PageTokens(tokens)),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("page_tokens")));
  }
}

TEST(PageLayoutTest, PagesForAByteBudgetNeverTakeMoreBytesThanTheBudget) {
  const plan::AttentionShape shape = Shape(2, 1, 64);
  const PageLayout layout =
      LayOut(plan::FullRankPlan(shape, BF16), shape, PageTokens(16));
  const int64_t page = layout.page_groups()[0].page_bytes;
  EXPECT_THAT(layout.PagesForBudget(
                  {.budget_bytes = 10 * page + page - 1, .max_model_len = 64}),
              ElementsAre(10));
  EXPECT_THAT(
      layout.PagesForBudget({.budget_bytes = page - 1, .max_model_len = 64}),
      ElementsAre(0));
}

TEST(PageLayoutTest,
     DividesTheBudgetAmongPageGroupsByThePagesThatASequenceHolds) {
  plan::AttentionShape shape = Shape(2, 1, 64);
  shape.layers[1].sliding_window = 33;
  const PageLayout layout =
      LayOut(plan::FullRankPlan(shape, BF16), shape, PageTokens(16));
  const int64_t page = layout.page_groups()[0].page_bytes;
  // A sequence of 128 tokens holds 8 pages in the group without a window and 3
  // in the group with a window.
  EXPECT_EQ(layout.PagesHeld(PageGroupId(0), 128, 1), 8);
  EXPECT_EQ(layout.PagesHeld(PageGroupId(1), 128, 1), 3);
  EXPECT_THAT(layout.PagesForBudget({.budget_bytes = 110 * page,
                                     .max_model_len = 128,
                                     .max_chunk_tokens = 1}),
              ElementsAre(80, 30));
  // A sequence of 16 tokens holds one page of each group. So the 111 pages are
  // divided equally; group 0 also gets the last one.
  EXPECT_THAT(layout.PagesForBudget({.budget_bytes = 111 * page,
                                     .max_model_len = 16,
                                     .max_chunk_tokens = 1}),
              ElementsAre(56, 55));
  EXPECT_EQ(layout.BytesAtLength(128, 1), 11 * page);
}

TEST(PageLayoutTest,
     TheErrorForAPoolTooSmallForOneSequenceNamesTheFlagsToChange) {
  const plan::AttentionShape shape = Shape(1, 1, 64);
  const PageLayout layout =
      LayOut(plan::FullRankPlan(shape, BF16), shape, PageTokens(16));
  KVASIR_EXPECT_OK(layout.OneSequenceFits({4}, 64, 64));
  EXPECT_THAT(layout.OneSequenceFits({3}, 64, 64),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("one sequence of 64 tokens"),
                             HasSubstr("needs 4 pages of 4096 bytes and has 3"),
                             HasSubstr("--kv-cache-bytes to at least 16384 "
                                       "bytes or lower"),
                             HasSubstr("--max-model-len to at most 48"))));
  // The error gives sizes of 1 MiB and more in mebibytes.
  EXPECT_THAT(layout.OneSequenceFits({3}, 8192, 64).message(),
              HasSubstr("2097152 bytes (2 MiB) or lower"));
}

TEST(PageLayoutTest, RefusesAModelLengthAboveTheLongestSupportedSequence) {
  const plan::AttentionShape shape = Shape(1, 1, 64);
  const PageLayout layout =
      LayOut(plan::FullRankPlan(shape, BF16), shape, PageTokens(1));
  const int64_t huge = std::numeric_limits<int64_t>::max();
  const PageCounts pages =
      layout.PagesForBudget({.budget_bytes = 1 << 20, .max_model_len = huge});
  EXPECT_THAT(pages, ElementsAre((1 << 20) / 256));
  EXPECT_THAT(
      layout.OneSequenceFits(pages, huge, 1),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("max_model_len must be 1 to 1073741824 tokens")));
  EXPECT_EQ(layout.BytesAtLength(kMaxSequenceTokens, 1),
            kMaxSequenceTokens * 256);
}

}  // namespace
}  // namespace kvasir::cache
