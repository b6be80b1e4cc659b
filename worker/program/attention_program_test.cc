#include "worker/program/attention_program.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "google/protobuf/util/json_util.h"

namespace kvasir::worker {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr char kFull[] =
    R"({"full":{},"stored":"NO_ROPE","codec":{"dtype":"BF16"}})";
constexpr char kFullKey[] =
    R"({"full":{},"stored":"POST_ROPE","codec":{"dtype":"BF16"}})";

// A model of one layer: hidden size 24, 4 query heads and 2 KV heads of 8 dims
// (4 rotation pairs).
plan::AttentionShape Shape() {
  plan::AttentionShape shape;
  shape.hidden_size = 24;
  shape.num_heads = 4;
  shape.num_kv_heads = 2;
  shape.head_dim = 8;
  shape.rotary_dim = 8;
  shape.layers.resize(1);
  return shape;
}

plan::AttentionShape WithoutRope() {
  plan::AttentionShape shape = Shape();
  shape.layers[0].rope = false;
  return shape;
}

constexpr RankHeads kAll{{0, 4}, {0, 2}};
constexpr RankHeads kSecondOfTwo{{2, 2}, {1, 1}};

AttentionProgram Make(const std::string& key_parts,
                      const std::string& value_parts,
                      const plan::AttentionShape& shape = Shape(),
                      const RankHeads& heads = kAll) {
  kvasir::v1::LayerPlan plan;
  const std::string json =
      absl::StrCat(R"({"key":{"parts":[)", key_parts,
                   R"(]},"value":{"parts":[)", value_parts, "]}}");
  const auto status = google::protobuf::util::JsonStringToMessage(json, &plan);
  EXPECT_TRUE(status.ok()) << status.ToString() << json;
  const auto attention = plan::ResolveAttention(plan, shape, 0);
  EXPECT_TRUE(attention.ok()) << attention.status();
  if (!attention.ok()) return {};
  auto program = MakeAttentionProgram(*attention, shape, 0, heads);
  EXPECT_TRUE(program.ok()) << program.status();
  return program.ok() ? *std::move(program) : AttentionProgram();
}

// A low_rank part with two groups: KV head 1 with rank 3, KV head 0 with rank
// 2.
std::string LowRank(const std::string& lift, const std::string& stored,
                    const std::string& codec = R"({"dtype":"BF16"})") {
  return absl::StrCat(R"({"low_rank":{"groups":[{"heads":[1],"rank":3},)",
                      R"({"heads":[0],"rank":2}]},"uses":[{")", lift,
                      R"(":{}}],"stored":")", stored, R"(","codec":)", codec,
                      "}");
}

// A rope_pairs part: KV head 0 keeps pairs 1 and 3, KV head 1 keeps pairs 0 and
// 2.
std::string Pairs(const std::string& lift, const std::string& stored) {
  return absl::StrCat(R"({"rope_pairs":{"per_head":[{"pair_indices":[1,3]},)",
                      R"({"pair_indices":[0,2]}]},"uses":[{")", lift,
                      R"(":{}}],"stored":")", stored,
                      R"(","codec":{"dtype":"BF16"}})");
}

// A rope_low_rank part with one group of both KV heads: two channels for pair 1
// and one for pair 3.
std::string Complex(const std::string& lift, const std::string& stored) {
  return absl::StrCat(
      R"({"rope_low_rank":{"groups":[{"heads":[0,1],"pairs":[1,3],)",
      R"("rank_per_pair":[2,1]}]},"uses":[{")", lift, R"(":{}}],"stored":")",
      stored, R"(","codec":{"dtype":"BF16"}})");
}

std::string Basis(const std::string& stored) {
  return absl::StrCat(
      R"({"full":{},"stored":")", stored,
      R"(","mean":true,"codec":{"bits":{"schedule":[8,4,4,4,2,2,0,0]},)",
      R"("channel_static":{},"basis_static":{}}})");
}

TEST(AttentionProgramTest,
     AFullRankLayerHasOneProjectionEachForQueriesKeysAndValues) {
  const AttentionProgram program = Make(kFullKey, kFull);
  ASSERT_EQ(program.projections.size(), 3);
  EXPECT_EQ(program.projections[0].name, "self_attn.q_proj");
  EXPECT_THAT(program.projections[0].takes, ElementsAre(RowTake{0, 32, 0}));
  EXPECT_EQ(program.projections[1].name, "self_attn.k_proj");
  EXPECT_THAT(program.projections[1].takes, ElementsAre(RowTake{0, 16, 32}));
  EXPECT_EQ(program.projections[2].name, "self_attn.v_proj");
  EXPECT_THAT(program.projections[2].takes, ElementsAre(RowTake{0, 16, 48}));
  EXPECT_EQ(program.projection_columns, 64);
  EXPECT_EQ(program.row_columns, 64);
  const KeyProgram& key = program.key[0];
  EXPECT_THAT(key.query_rotations,
              ElementsAre(Rotation{
                  0, 4, 8, plan::RopePairing::kHalfSplit, 4, {0, 1, 2, 3}}));
  EXPECT_THAT(key.rotations,
              ElementsAre(Rotation{
                  32, 2, 8, plan::RopePairing::kHalfSplit, 4, {0, 1, 2, 3}}));
  EXPECT_FALSE(key.rebuild.has_value());
  EXPECT_EQ(key.lift, QueryLift::kNone);
  EXPECT_THAT(key.query.column, ElementsAre(0, 8, 16, 24));
  EXPECT_THAT(key.group_of_head, ElementsAre(0, 1));
  EXPECT_THAT(program.value.attended.column, ElementsAre(0, 8, 16, 24));
  EXPECT_EQ(program.output_columns, 32);
  EXPECT_FALSE(program.value.lifted);
}

TEST(AttentionProgramTest, ARankReadsTheWeightsOfItsHeads) {
  const AttentionProgram program = Make(kFullKey, kFull, Shape(), kSecondOfTwo);
  EXPECT_THAT(program.projections[0].takes, ElementsAre(RowTake{16, 16, 0}));
  EXPECT_THAT(program.projections[1].takes, ElementsAre(RowTake{8, 8, 16}));
  EXPECT_THAT(program.projections[2].takes, ElementsAre(RowTake{8, 8, 24}));
  EXPECT_EQ(program.row_columns, 32);
  EXPECT_EQ(program.output_first_column, 16);
  EXPECT_EQ(program.output_columns, 16);
  EXPECT_EQ(program.output_all_columns, 32);
}

TEST(AttentionProgramTest,
     RebuildingFullRankKeysStoredBeforeRopeOnlyRotatesThem) {
  const AttentionProgram program = Make(
      R"({"full":{},"stored":"PRE_ROPE","codec":{"dtype":"BF16"}})", kFull);
  const KeyProgram& key = program.key[0];
  EXPECT_THAT(key.rotations, IsEmpty());
  ASSERT_TRUE(key.rebuild.has_value());
  EXPECT_EQ(key.rebuild->dims, 8);
  EXPECT_FALSE(key.rebuild->lifted);
  EXPECT_THAT(key.rebuild->rotation.pairs, ElementsAre(0, 1, 2, 3));
  EXPECT_EQ(key.query_rotations.size(), 1);
}

TEST(AttentionProgramTest, HeadGroupsMayHaveLatentsOfDifferentWidths) {
  const AttentionProgram program =
      Make(LowRank("reconstruct", "PRE_ROPE"), LowRank("fold", "NO_ROPE"));
  const KeyProgram& key = program.key[0];
  ASSERT_TRUE(key.rebuild.has_value());
  EXPECT_TRUE(key.rebuild->lifted);
  EXPECT_EQ(key.rebuild->dims, 8);
  EXPECT_EQ(key.rebuild->rotation.num_pairs, 4);
  EXPECT_THAT(key.group_of_head, ElementsAre(1, 0));
  EXPECT_EQ(key.latents[0].width, 3);
  EXPECT_EQ(key.latents[1].column, 3);
  EXPECT_EQ(key.latent_column, 32);
  EXPECT_EQ(key.latent_columns, 5);
  EXPECT_EQ(program.projections[1].name, "self_attn.k_proj.down");
  EXPECT_THAT(program.projections[1].takes, ElementsAre(RowTake{0, 5, 32}));
  // Query heads 0 and 1 read KV head 0, which has rank 2. The others read KV
  // head 1, which has rank 3.
  EXPECT_THAT(program.value.attended.column, ElementsAre(0, 2, 4, 7));
  EXPECT_THAT(program.value.attended.width, ElementsAre(2, 2, 3, 3));
  EXPECT_EQ(program.output_columns, 10);
}

TEST(AttentionProgramTest, ARankHoldsOnlyTheLatentGroupsOfItsHeads) {
  const AttentionProgram program =
      Make(LowRank("reconstruct", "PRE_ROPE"), LowRank("fold", "NO_ROPE"),
           Shape(), kSecondOfTwo);
  const KeyProgram& key = program.key[0];
  ASSERT_EQ(key.latents.size(), 1);
  EXPECT_EQ(key.latents[0].index, 0);
  EXPECT_THAT(key.latents[0].heads, ElementsAre(0));
  EXPECT_THAT(program.projections[1].takes, ElementsAre(RowTake{0, 3, 16}));
  EXPECT_EQ(program.output_first_column, 4);
  EXPECT_EQ(program.output_columns, 6);
}

TEST(AttentionProgramTest, EachRankHoldsTheWholeLatentOfAGroupThatSpansRanks) {
  const std::string joint =
      R"({"low_rank":{"groups":[{"heads":[1,0],"rank":7}]},)"
      R"("uses":[{"at_runtime":{}}],"stored":"NO_ROPE",)"
      R"("codec":{"dtype":"BF16"}})";
  const AttentionProgram program = Make(kFullKey, joint, Shape(), kSecondOfTwo);
  const ValueProgram& value = program.value;
  ASSERT_EQ(value.latents.size(), 1);
  EXPECT_THAT(value.latents[0].heads, ElementsAre(0));
  // Head 1 is the second in the lift's tensor, in which heads ascend.
  EXPECT_THAT(value.latents[0].places, ElementsAre(1));
  EXPECT_EQ(value.latent_columns, 7);
  EXPECT_TRUE(value.lifted);
  EXPECT_THAT(value.attended.column, ElementsAre(0, 7));
  EXPECT_EQ(program.output_first_column, 16);
}

TEST(AttentionProgramTest, ALatentSharedByKeysAndValuesIsProjectedOnce) {
  kvasir::v1::LayerPlan plan;
  const auto status = google::protobuf::util::JsonStringToMessage(
      R"({"joint":[{"low_rank":{"groups":[{"heads":[1],"rank":3},
          {"heads":[0],"rank":2}]},
          "uses":[{"reconstruct":{},"serves":"SERVES_KEY"},
                  {"at_runtime":{},"serves":"SERVES_VALUE"}],
          "stored":"PRE_ROPE","codec":{"bits":{"schedule":[4]},
          "channel_static":{}}}]})",
      &plan);
  ASSERT_TRUE(status.ok()) << status.ToString();
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto attention,
                              plan::ResolveAttention(plan, Shape(), 0));
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const AttentionProgram program,
      MakeAttentionProgram(attention, Shape(), 0, kAll));
  EXPECT_TRUE(program.joint);
  ASSERT_EQ(program.projections.size(), 2);
  EXPECT_EQ(program.projections[1].name, "self_attn.kv_proj.down");
  EXPECT_THAT(program.projections[1].takes, ElementsAre(RowTake{0, 5, 32}));
  EXPECT_EQ(program.row_columns, 32 + 5);
  const KeyProgram& key = program.key[0];
  const ValueProgram& value = program.value;
  ASSERT_TRUE(key.rebuild.has_value());
  EXPECT_TRUE(key.rebuild->lifted);
  EXPECT_EQ(key.lift_prefix, "up_key");
  EXPECT_TRUE(value.lifted);
  EXPECT_EQ(value.lift_prefix, "up_value");
  EXPECT_EQ(key.latent_column, 32);
  EXPECT_EQ(value.latent_column, 32);
  EXPECT_EQ(value.range_takes, key.range_takes);
  EXPECT_THAT(value.attended.width, ElementsAre(2, 2, 3, 3));
}

TEST(AttentionProgramTest, QueryRowsAreSelectedByTheRotationPairsThatKeysKeep) {
  const AttentionProgram program =
      Make(Pairs("at_runtime", "POST_ROPE"), kFull);
  // With half-split pairing, pair p consists of dims p and p + 4. The RowTake
  // of two rows has head 1's last row (15) and head 2's first row (16).
  EXPECT_THAT(
      program.projections[0].takes,
      ElementsAre(RowTake{1, 1, 0}, RowTake{3, 1, 1}, RowTake{5, 1, 2},
                  RowTake{7, 1, 3}, RowTake{9, 1, 4}, RowTake{11, 1, 5},
                  RowTake{13, 1, 6}, RowTake{15, 2, 7}, RowTake{18, 1, 9},
                  RowTake{20, 1, 10}, RowTake{22, 1, 11}, RowTake{24, 1, 12},
                  RowTake{26, 1, 13}, RowTake{28, 1, 14}, RowTake{30, 1, 15}));
  const KeyProgram& key = program.key[0];
  EXPECT_THAT(key.query_rotations,
              ElementsAre(Rotation{0,
                                   4,
                                   4,
                                   plan::RopePairing::kHalfSplit,
                                   2,
                                   {1, 3, 1, 3, 0, 2, 0, 2}}));
  EXPECT_THAT(key.rotations,
              ElementsAre(Rotation{
                  16, 2, 4, plan::RopePairing::kHalfSplit, 2, {1, 3, 0, 2}}));
  EXPECT_FALSE(key.rebuild.has_value());
  EXPECT_EQ(key.lift, QueryLift::kNone);
}

TEST(AttentionProgramTest,
     QueriesUseAllRowsOfTheirMatrixIfTheSelectionOfRotationPairsIsFolded) {
  const AttentionProgram program = Make(Pairs("fold", "PRE_ROPE"), kFull);
  EXPECT_THAT(program.projections[0].takes, ElementsAre(RowTake{0, 16, 0}));
  const KeyProgram& key = program.key[0];
  EXPECT_EQ(key.query_rotations.size(), 1);
  EXPECT_THAT(key.rotations, IsEmpty());
  ASSERT_TRUE(key.rebuild.has_value());
  EXPECT_FALSE(key.rebuild->lifted);
  EXPECT_EQ(key.rebuild->dims, 4);
  EXPECT_THAT(key.rebuild->rotation.pairs, ElementsAre(1, 3, 0, 2));
  EXPECT_TRUE(key.rebuild->rotation.per_head());
}

TEST(AttentionProgramTest, QueryRowsOfInterleavedRotationPairsKeepTheirOrder) {
  plan::AttentionShape shape = Shape();
  shape.pairing = plan::RopePairing::kInterleaved;
  const AttentionProgram program =
      Make(Pairs("at_runtime", "POST_ROPE"), kFull, shape, kSecondOfTwo);
  // Query heads 2 and 3 read KV head 1, which keeps pairs 0 and 2. With
  // interleaved pairing these are dims 0, 1, 4 and 5.
  EXPECT_THAT(program.projections[0].takes,
              ElementsAre(RowTake{16, 2, 0}, RowTake{20, 2, 2},
                          RowTake{24, 2, 4}, RowTake{28, 2, 6}));
  EXPECT_THAT(program.key[0].rotations,
              ElementsAre(Rotation{
                  8, 1, 4, plan::RopePairing::kInterleaved, 2, {0, 2}}));
}

TEST(AttentionProgramTest, AComplexLiftIsAppliedToRotatedQueries) {
  const AttentionProgram program =
      Make(Complex("at_runtime", "POST_ROPE"), kFull);
  const KeyProgram& key = program.key[0];
  EXPECT_EQ(key.lift, QueryLift::kComplex);
  EXPECT_EQ(key.latents[0].width, 6);
  EXPECT_THAT(key.latents[0].channel_place, ElementsAre(0, 0, 1));
  // All four query heads rotate by pairs 1 and 3. The channels of the keys
  // rotate by the pairs that they represent.
  EXPECT_THAT(
      key.query_rotations,
      ElementsAre(Rotation{0, 4, 4, plan::RopePairing::kHalfSplit, 2, {1, 3}}));
  EXPECT_THAT(key.rotations,
              ElementsAre(Rotation{
                  16, 1, 6, plan::RopePairing::kHalfSplit, 3, {1, 1, 3}}));
  EXPECT_EQ(program.projection_columns, 16 + 6 + 16);
  EXPECT_THAT(key.query.column, ElementsAre(38, 44, 50, 56));
  EXPECT_EQ(program.row_columns, 38 + 24);
}

TEST(AttentionProgramTest,
     LatentChannelsOfOneRotationPairNeedNotLieSideBySide) {
  const AttentionProgram program =
      Make(R"({"rope_low_rank":{"groups":[{"heads":[0,1],"pairs":[3,1,3],)"
           R"("rank_per_pair":[1,1,1]}]},"uses":[{"at_runtime":{}}],)"
           R"("stored":"POST_ROPE","codec":{"dtype":"BF16"}})",
           kFull);
  const KeyProgram& key = program.key[0];
  EXPECT_THAT(key.latents[0].pairs, ElementsAre(1, 3));
  EXPECT_THAT(key.latents[0].channel_place, ElementsAre(1, 0, 1));
  EXPECT_THAT(
      key.query_rotations,
      ElementsAre(Rotation{0, 4, 4, plan::RopePairing::kHalfSplit, 2, {1, 3}}));
  EXPECT_THAT(key.rotations,
              ElementsAre(Rotation{
                  16, 1, 6, plan::RopePairing::kHalfSplit, 3, {3, 1, 3}}));
}

TEST(AttentionProgramTest,
     QueriesWithAFoldedComplexLiftRotateLikeTheLatentChannels) {
  const AttentionProgram program = Make(Complex("fold", "POST_ROPE"), kFull);
  const KeyProgram& key = program.key[0];
  EXPECT_EQ(key.lift, QueryLift::kNone);
  EXPECT_THAT(program.projections[0].takes, ElementsAre(RowTake{0, 24, 0}));
  EXPECT_THAT(key.query_rotations,
              ElementsAre(Rotation{
                  0, 4, 6, plan::RopePairing::kHalfSplit, 3, {1, 1, 3}}));
}

TEST(AttentionProgramTest,
     KeysMayHaveOnePartForRotatedDimsAndOneForUnrotatedDims) {
  plan::AttentionShape shape = Shape();
  shape.rotary_dim = 4;  // pairs 0 and 1 rotate, dims 4..7 do not
  const std::string pairs =
      R"({"rope_pairs":{"per_head":[{"pair_indices":[1]},)"
      R"({"pair_indices":[0]}]},"uses":[{"at_runtime":{}}],)"
      R"("stored":"POST_ROPE","codec":{"dtype":"BF16"}})";
  const AttentionProgram program = Make(
      absl::StrCat(pairs, ",", LowRank("at_runtime", "NO_ROPE")), kFull, shape);
  ASSERT_EQ(program.key.size(), 2);
  // The columns begin with the rotated part: dims 1 and 3 of query heads 0 and
  // 1, and dims 0 and 2 of query heads 2 and 3. After them come dims 4..7 of
  // all heads.
  EXPECT_THAT(program.key[0].projected.column, ElementsAre(0, 2, 4, 6));
  EXPECT_THAT(program.key[1].projected.column, ElementsAre(8, 12, 16, 20));
  EXPECT_EQ(program.projections[0].takes[0], (RowTake{1, 1, 0}));
  EXPECT_EQ(program.projections[0].takes.back(), (RowTake{28, 4, 20}));
  EXPECT_EQ(program.key[0].prefix, "self_attn.k_proj.part0");
  EXPECT_EQ(program.projections[2].name, "self_attn.k_proj.part1.down");
  EXPECT_EQ(program.key[1].lift, QueryLift::kMatrix);
  EXPECT_THAT(program.key[1].query_rotations, IsEmpty());
  EXPECT_THAT(program.key[1].query.width, ElementsAre(2, 2, 3, 3));
  // Lifted queries begin at column 49, after 8 + 16 columns of queries, 4 + 5
  // of key latents, and 16 of values.
  EXPECT_THAT(program.key[1].query.column, ElementsAre(49, 51, 53, 56));
}

TEST(AttentionProgramTest, KeysMayHaveOnePartWithAFoldedLiftAndOneWithout) {
  plan::AttentionShape shape = Shape();
  shape.rotary_dim = 4;
  const std::string pairs =
      R"({"rope_pairs":{"per_head":[{"pair_indices":[1]},)"
      R"({"pair_indices":[0]}]},"uses":[{"at_runtime":{}}],)"
      R"("stored":"POST_ROPE","codec":{"dtype":"BF16"}})";
  const AttentionProgram program =
      Make(absl::StrCat(pairs, ",", LowRank("fold", "NO_ROPE")), kFull, shape,
           kSecondOfTwo);
  // Each head has rows of q_proj for both key parts: heads 0 and 1 have 2 + 2
  // rows each, heads 2 and 3 have 2 + 3 rows each.
  EXPECT_THAT(program.projections[0].takes,
              ElementsAre(RowTake{8, 2, 0}, RowTake{13, 2, 2},
                          RowTake{10, 3, 4}, RowTake{15, 3, 7}));
  EXPECT_EQ(program.key[1].lift, QueryLift::kNone);
}

TEST(AttentionProgramTest,
     TheRunTimeLiftOfLowRankKeysWithoutRopeIsAppliedToTheQueries) {
  const AttentionProgram program =
      Make(LowRank("at_runtime", "NO_ROPE"), LowRank("at_runtime", "NO_ROPE"),
           WithoutRope());
  const KeyProgram& key = program.key[0];
  EXPECT_FALSE(program.rotates);
  EXPECT_FALSE(key.rebuild.has_value());
  EXPECT_THAT(key.query_rotations, IsEmpty());
  EXPECT_EQ(key.lift, QueryLift::kMatrix);
  EXPECT_THAT(key.query.column, ElementsAre(42, 44, 46, 49));
  EXPECT_TRUE(program.value.lifted);
}

TEST(AttentionProgramTest,
     ReconstructedKeysWithoutRopeAreRebuiltUnlessTheyHaveAnOnlineHadamard) {
  const AttentionProgram rebuilt =
      Make(LowRank("reconstruct", "NO_ROPE"), kFull, WithoutRope());
  ASSERT_TRUE(rebuilt.key[0].rebuild.has_value());
  EXPECT_EQ(rebuilt.key[0].rebuild->rotation.num_pairs, 0);
  const AttentionProgram mixed =
      Make(LowRank("reconstruct", "NO_ROPE",
                   R"({"dtype":"BF16","hadamard_online":{}})"),
           kFull, WithoutRope());
  EXPECT_FALSE(mixed.key[0].rebuild.has_value());
  EXPECT_EQ(mixed.key[0].lift, QueryLift::kMatrix);
  EXPECT_TRUE(mixed.key[0].hadamard);
}

TEST(AttentionProgramTest, KeysStoredBeforeRopeAreRebuiltFromAStaticBasis) {
  const AttentionProgram program =
      Make(Basis("PRE_ROPE"), Basis("NO_ROPE"), Shape(), kSecondOfTwo);
  const KeyProgram& key = program.key[0];
  EXPECT_TRUE(key.has_basis);
  EXPECT_TRUE(key.has_mean);
  ASSERT_TRUE(key.rebuild.has_value());
  EXPECT_TRUE(key.rebuild->lifted);
  EXPECT_TRUE(key.rebuild->has_bias);
  // Every rank computes the latent from the keys of all heads (16 columns). It
  // has only 12 channels, because 4 of 16 have 0 bits.
  EXPECT_THAT(program.projections[1].takes, ElementsAre(RowTake{0, 16, 16}));
  EXPECT_EQ(key.source_column, 16);
  EXPECT_EQ(key.source_columns, 16);
  EXPECT_EQ(key.latent_columns, 12);
  EXPECT_EQ(program.projection_columns, 16 + 16 + 16);
  EXPECT_EQ(key.latent_column, 48);
  EXPECT_EQ(program.value.latent_column, 60);
  EXPECT_EQ(program.row_columns, 72);
  EXPECT_THAT(key.range_takes, ElementsAre(RowTake{0, 12, 0}));
  EXPECT_TRUE(program.value.lifted);
}

TEST(AttentionProgramTest,
     AStaticBasisOfKeysStoredAfterRopeIsAbsorbedIntoTheQueries) {
  const AttentionProgram program = Make(Basis("POST_ROPE"), kFull);
  const KeyProgram& key = program.key[0];
  EXPECT_FALSE(key.rebuild.has_value());
  EXPECT_EQ(key.lift, QueryLift::kMatrix);
  EXPECT_THAT(key.rotations,
              ElementsAre(Rotation{
                  32, 2, 8, plan::RopePairing::kHalfSplit, 4, {0, 1, 2, 3}}));
  EXPECT_EQ(key.query_rotations.size(), 1);
  EXPECT_THAT(key.query.width, ElementsAre(12, 12, 12, 12));
}

TEST(AttentionProgramTest, StaticRangesAreLoadedOnlyForTheGroupsOfTheRank) {
  const std::string codec = R"({"bits":{"schedule":[4]},"channel_static":{}})";
  const AttentionProgram program =
      Make(LowRank("reconstruct", "PRE_ROPE", codec), kFull, Shape(),
           {{0, 2}, {0, 1}});
  EXPECT_TRUE(program.key[0].static_ranges);
  EXPECT_THAT(program.key[0].range_takes, ElementsAre(RowTake{3, 2, 0}));
  EXPECT_FALSE(program.value.static_ranges);
}

TEST(AttentionProgramTest,
     TheProgramKeepsTheQueryKeyValueAndOutputBiasesOfTheModel) {
  plan::AttentionShape shape = Shape();
  shape.qkv_bias = true;
  const AttentionProgram program = Make(LowRank("reconstruct", "PRE_ROPE"),
                                        LowRank("fold", "NO_ROPE"), shape);
  EXPECT_TRUE(program.has_bias);
  EXPECT_TRUE(program.projections[0].has_bias);
  EXPECT_FALSE(program.projections[1].has_bias);
  EXPECT_TRUE(program.key[0].rebuild->has_bias);
  EXPECT_TRUE(program.output_bias);
}

}  // namespace
}  // namespace kvasir::worker
