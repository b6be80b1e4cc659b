// Tests ResolvePlan with a table of all methods, and the layers, ranks and
// eviction units of resolved plans.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_matchers.h"
#include "plan/resolved_plan.h"

namespace kvasir::plan {
namespace {

using base::StatusIs;
using kvasir::v1::BF16;
using kvasir::v1::KvPlan;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// A shape with one layer of 8 query heads and 4 KV heads of 16 dimensions: 8
// RoPE pairs.
AttentionShape Shape() {
  AttentionShape shape;
  shape.num_heads = 8;
  shape.num_kv_heads = 4;
  shape.head_dim = 16;
  shape.hidden_size = 32;
  shape.rotary_dim = 16;
  shape.layers.resize(1);
  return shape;
}

constexpr char kFullKey[] =
    R"({"full":{},"stored":"POST_ROPE","codec":{"dtype":"BF16"}})";
constexpr char kFullValue[] =
    R"({"full":{},"stored":"NO_ROPE","codec":{"dtype":"BF16"}})";

std::string Layer(const std::string& key, const std::string& value,
                  const std::string& rest = "") {
  return absl::StrCat(R"({"key":{"parts":[)", key, R"(]},"value":{"parts":[)",
                      value, "]}", rest, "}");
}

KvPlan Parse(const std::vector<std::string>& layers) {
  auto plan = ParsePlanJson(absl::StrCat(R"({"schema_version":1,"layers":[)",
                                         absl::StrJoin(layers, ","), "]}"),
                            "test");
  KVASIR_EXPECT_OK(plan);
  return plan.ok() ? *std::move(plan) : KvPlan();
}

ResolvedPlan Resolve(const std::vector<std::string>& layers,
                     AttentionShape shape = Shape(), TpShard shard = {}) {
  shape.layers.resize(layers.size());
  auto resolved = ResolvePlan(Parse(layers), shape, shard);
  KVASIR_EXPECT_OK(resolved);
  return resolved.ok() ? *std::move(resolved) : ResolvedPlan();
}

// Lists each latent as a line: space, before or after RoPE, {KV heads}, widths
// R and R', head_dims, [runs as begin+width x bits], and bytes of codes + bytes
// of parameters. For example "low_rank before {0,1} R=20 R'=20 d=16 [0+20x3]
// 8+4 bytes".
std::vector<std::string> Listed(const ResolvedPart& part) {
  constexpr const char* kSpaces[] = {"full", "low_rank", "pairs", "complex"};
  constexpr const char* kStored[] = {"before", "after", "unrotated"};
  std::vector<std::string> lines;
  for (const ResolvedLatent& latent : part.latents) {
    std::vector<std::string> runs;
    for (const CodeRun& run : latent.runs) {
      runs.push_back(absl::StrCat(run.begin, "+", run.width, "x", run.bits));
    }
    lines.push_back(
        absl::StrCat(kSpaces[static_cast<int>(part.space)], " ",
                     kStored[static_cast<int>(part.stored)], " {",
                     absl::StrJoin(latent.heads, ","), "} R=", latent.width,
                     " R'=", latent.channels, " d=", latent.head_dims, " [",
                     absl::StrJoin(runs, " "), "] ", part.CodesBytes(latent),
                     "+", part.ParamsBytes(latent), " bytes"));
  }
  return lines;
}

struct Case {
  std::string name;
  std::string key;
  std::string value;
  std::vector<std::string> keys;    // the expected lines of Listed
  std::vector<std::string> values;  // if empty, they are not checked
  bool folded = false;  // of the keys: the lift is folded into q_proj
  bool rebuilt = false;
  std::vector<int64_t> dims;
};

std::vector<Case> Cases() {
  const std::string two =
      R"("low_rank":{"groups":[{"heads":[1,0],"rank":20},
         {"heads":[2,3],"rank":8}]},)";
  std::vector<int64_t> all;
  for (int64_t d = 0; d < 16; ++d) all.push_back(d);
  return {
      {.name = "Full",
       .key = kFullKey,
       .value = kFullValue,
       .keys = {"full after {0} R=16 R'=16 d=16 [] 32+0 bytes",
                "full after {1} R=16 R'=16 d=16 [] 32+0 bytes",
                "full after {2} R=16 R'=16 d=16 [] 32+0 bytes",
                "full after {3} R=16 R'=16 d=16 [] 32+0 bytes"}},
      {.name = "Palu",
       .key = "{" + two +
              R"("uses":[{"reconstruct":{}}],"stored":"PRE_ROPE","codec":{
                 "bits":{"schedule":[3]},"per_token":{},"param_dtype":"F16",
                 "hadamard_fused":{}}})",
       .value = "{" + two + R"("uses":[{"fold":{}}],"stored":"NO_ROPE",
                 "codec":{"dtype":"F32"}})",
       .keys = {"low_rank before {0,1} R=20 R'=20 d=16 [0+20x3] 8+4 bytes",
                "low_rank before {2,3} R=8 R'=8 d=16 [0+8x3] 3+4 bytes"},
       .values = {"low_rank unrotated {0,1} R=20 R'=20 d=16 [] 80+0 bytes",
                  "low_rank unrotated {2,3} R=8 R'=8 d=16 [] 32+0 bytes"},
       .rebuilt = true,
       .dims = all},
      {.name = "RangesOfFourChannels",
       .key = "{" + two +
              R"("uses":[{"reconstruct":{}}],"stored":"PRE_ROPE","codec":{
                 "bits":{"schedule":[2]},"per_token":{"group":4},
                 "param_dtype":"F32"}})",
       .value = kFullValue,
       .keys = {"low_rank before {0,1} R=20 R'=20 d=16 [0+20x2] 5+40 bytes",
                "low_rank before {2,3} R=8 R'=8 d=16 [0+8x2] 2+16 bytes"},
       .rebuilt = true,
       .dims = all},
      {.name = "Rap",
       .key = R"({"rope_pairs":{"per_head":[{"pair_indices":[0,2]},
                 {"pair_indices":[1,2]},{"pair_indices":[0,7]},
                 {"pair_indices":[3,4]}]},"uses":[{"fold":{}}],
                 "stored":"POST_ROPE","codec":{"dtype":"BF16"}})",
       .value = kFullValue,
       .keys = {"pairs after {0} R=4 R'=4 d=4 [] 8+0 bytes",
                "pairs after {1} R=4 R'=4 d=4 [] 8+0 bytes",
                "pairs after {2} R=4 R'=4 d=4 [] 8+0 bytes",
                "pairs after {3} R=4 R'=4 d=4 [] 8+0 bytes"},
       .folded = true},
      {.name = "Commuting",
       .key = R"({"rope_low_rank":{"groups":[{"heads":[0,3],"pairs":[0,1,3],
                 "rank_per_pair":[2,1,1]},{"heads":[2,1],"pairs":[1],
                 "rank_per_pair":[2]}]},"uses":[{"at_runtime":{}}],
                 "stored":"POST_ROPE","codec":{"dtype":"BF16"}})",
       .value = kFullValue,
       .keys = {"complex after {0,3} R=8 R'=8 d=6 [] 16+0 bytes",
                "complex after {1,2} R=4 R'=4 d=2 [] 8+0 bytes"}},
      // The complex channels are in order of falling bits (5, 3, 3), so the two
      // of RoPE pair 3 are not neighbours. Runs list real parts first.
      {.name = "CommutingFallingBits",
       .key = R"({"rope_low_rank":{"groups":[{"heads":[0,1,2,3],
                 "pairs":[3,0,3],"rank_per_pair":[1,1,1]}]},
                 "uses":[{"at_runtime":{}}],"stored":"POST_ROPE","codec":{
                 "bits":{"runs":[{"channels":1,"bits":5},
                 {"channels":2,"bits":3},{"channels":1,"bits":5},
                 {"channels":2,"bits":3}]},"channel_static":{}}})",
       .value = kFullValue,
       .keys = {"complex after {0,1,2,3} R=6 R'=6 d=4 "
                "[0+1x5 1+2x3 3+1x5 4+2x3] 3+0 bytes"}},
      {.name = "SvdqStatic",
       .key = R"({"full":{},"stored":"PRE_ROPE","mean":true,"codec":{"bits":{
                 "schedule":[8,4,4,2,0,0,0,0]},"channel_static":{},
                 "basis_static":{}}})",
       .value = kFullValue,
       .keys = {"full before {0,1,2,3} R=64 R'=32 d=16 "
                "[0+8x8 8+8x4 16+8x4 24+8x2] 18+0 bytes"}},
      // A basis that is computed for each sequence needs all channels, also
      // those of 0 bits.
      {.name = "SvdqOnline",
       .key = R"({"full":{},"stored":"PRE_ROPE","mean":true,"codec":{"bits":{
                 "schedule":[8,4,4,2,0,0,0,0]},"channel_sequence":{},
                 "param_dtype":"F16","basis_sequence":{}}})",
       .value = kFullValue,
       .keys = {"full before {0,1,2,3} R=64 R'=64 d=16 "
                "[0+8x8 8+8x4 16+8x4 24+8x2] 18+0 bytes"}},
      {.name = "RunsOfChannels",
       .key = "{" + std::string(R"("low_rank":{"groups":[{"heads":[0,1,2,3],
                 "rank":8}]},"uses":[{"reconstruct":{}}],"stored":"PRE_ROPE",
                 "codec":{"bits":{"runs":[{"channels":3,"bits":6},
                 {"channels":4,"bits":2},{"channels":1,"bits":0}]},
                 "per_token":{},"param_dtype":"F16"}})"),
       .value = kFullValue,
       .keys = {"low_rank before {0,1,2,3} R=8 R'=7 d=16 [0+3x6 3+4x2] "
                "4+8 bytes"},
       .rebuilt = true,
       .dims = all},
      {.name = "RunsOfUnstoredMeans",
       .key = "{" + std::string(R"("low_rank":{"groups":[{"heads":[0,1,2,3],
                 "rank":8}]},"uses":[{"reconstruct":{}}],"stored":"PRE_ROPE",
                 "codec":{"bits":{"runs":[{"channels":1,"bits":5},
                 {"channels":2,"bits":5},{"channels":2,"bits":1},
                 {"channels":1,"bits":0},{"channels":2,"bits":0}]},
                 "channel_static":{}}})"),
       .value = kFullValue,
       .keys = {"low_rank before {0,1,2,3} R=8 R'=8 d=16 [0+3x5 3+2x1 5+3x0] "
                "3+0 bytes"},
       .rebuilt = true,
       .dims = all},
      {.name = "Norms",
       .key = R"({"full":{},"stored":"POST_ROPE","codec":{"bits":{"schedule":
                 [2]},"per_token_norm":{"levels":[-1,0,1,2]},
                 "param_dtype":"F16"}})",
       .value = kFullValue,
       .keys = {"full after {0} R=16 R'=16 d=16 [0+16x2] 4+2 bytes",
                "full after {1} R=16 R'=16 d=16 [0+16x2] 4+2 bytes",
                "full after {2} R=16 R'=16 d=16 [0+16x2] 4+2 bytes",
                "full after {3} R=16 R'=16 d=16 [0+16x2] 4+2 bytes"}},
      {.name = "SlowPairsOfALatent",
       .key = R"({"low_rank":{"groups":[{"heads":[0,1,2,3],"rank":8}]},
                 "uses":[{"pairs":[6,7],"reconstruct":{}}],
                 "stored":"PRE_ROPE","codec":{"dtype":"BF16"}})",
       .value = kFullValue,
       .keys = {"low_rank before {0,1,2,3} R=8 R'=8 d=4 [] 16+0 bytes"},
       .rebuilt = true,
       .dims = {6, 7, 14, 15}},
  };
}

class ResolvePlanTest : public ::testing::TestWithParam<Case> {};

TEST_P(ResolvePlanTest, ResolvedLatentsMatchThePlan) {
  const Case& each = GetParam();
  const ResolvedPlan plan = Resolve({Layer(each.key, each.value)});
  const ResolvedAttention& attention = plan.attention_of(0);
  const ResolvedPart& key = attention.key.parts[0];
  EXPECT_EQ(Listed(key), each.keys);
  EXPECT_EQ(key.folded, each.folded);
  EXPECT_EQ(key.rebuilt, each.rebuilt);
  EXPECT_EQ(key.dims, each.dims);
  EXPECT_EQ(key.prefix, "self_attn.k_proj");
  if (each.values.empty()) return;
  EXPECT_EQ(Listed(attention.value.parts[0]), each.values);
  EXPECT_EQ(attention.value.parts[0].prefix, "self_attn.v_proj");
}

INSTANTIATE_TEST_SUITE_P(Methods, ResolvePlanTest, ::testing::ValuesIn(Cases()),
                         [](const auto& parameter) {
                           return parameter.param.name;
                         });

TEST(ResolvedPlanTest, EqualLayersShareOneResolvedAttention) {
  const std::string full = Layer(kFullKey, kFullValue);
  const std::string wide = Layer(
      kFullKey, R"({"full":{},"stored":"NO_ROPE","codec":{"dtype":"F32"}})");
  const ResolvedPlan plan = Resolve({full, wide, full, full});
  EXPECT_EQ(plan.attention.size(), 2);
  std::vector<int> of_layer;
  for (const ResolvedLayer& layer : plan.layers) {
    of_layer.push_back(layer.attention);
  }
  EXPECT_THAT(of_layer, ElementsAre(0, 1, 0, 0));
}

TEST(ResolvedPlanTest,
     LayersWithAWindowHaveTheirOwnPageGroupButShareOneResolvedAttention) {
  AttentionShape shape = Shape();
  shape.layers.resize(3);
  shape.layers[1].sliding_window = 32;
  const std::string full = Layer(kFullKey, kFullValue);
  const ResolvedPlan plan = Resolve({full, full, full}, shape);
  EXPECT_EQ(plan.attention.size(), 1);
  ASSERT_EQ(plan.page_groups.size(), 2);
  EXPECT_THAT(plan.page_groups[0].layers, ElementsAre(0, 2));
  EXPECT_THAT(plan.page_groups[1].layers, ElementsAre(1));
  EXPECT_EQ(plan.page_groups[1].sliding_window, 32);
}

TEST(ResolvedPlanTest, LayersWithAndWithoutRopeShareNoResolvedAttention) {
  AttentionShape shape = Shape();
  shape.layers.resize(2);
  shape.layers[1].rope = false;
  const KvPlan plan = FullRankPlan(shape, BF16);
  KVASIR_ASSERT_OK_AND_ASSIGN(const ResolvedPlan resolved,
                              ResolvePlan(plan, shape));
  EXPECT_TRUE(resolved.attention_of(0).rotates);
  EXPECT_FALSE(resolved.attention_of(1).rotates);
}

TEST(ResolvedPlanTest, AJointPartProvidesBothKeysAndValues) {
  const ResolvedPlan plan = Resolve({R"({"exact_sinks":4,"joint":[{
      "low_rank":{"groups":[{"heads":[0,1,2,3],"rank":8}]},
      "uses":[{"reconstruct":{},"serves":"SERVES_KEY"},
              {"at_runtime":{},"serves":"SERVES_VALUE"}],
      "stored":"PRE_ROPE","codec":{"bits":{"schedule":[4]},
      "channel_static":{}}}]})"});
  const ResolvedAttention& attention = plan.attention_of(0);
  for (const Side side : {Side::kKey, Side::kValue}) {
    const bool key = side == Side::kKey;
    EXPECT_EQ(attention.side(side).exact_sinks, 4);
    ASSERT_EQ(attention.side(side).parts.size(), 1);
    const ResolvedPart& part = attention.side(side).parts[0];
    EXPECT_EQ(part.side, side);
    EXPECT_TRUE(part.joint);
    EXPECT_EQ(part.stores_latents(), key);
    EXPECT_EQ(part.prefix, "self_attn.kv_proj");
    EXPECT_EQ(part.lift_prefix, key ? "up_key" : "up_value");
    EXPECT_EQ(part.stored, key ? RopeSide::kBefore : RopeSide::kNone);
    EXPECT_EQ(part.rebuilt, key);
    ASSERT_EQ(part.uses.size(), 1);
    EXPECT_EQ(part.uses[0].rotated_dims, key ? 16 : 0);
    EXPECT_EQ(part.latents[0].width, 8);
  }
}

// Only sides that store codes have exact sinks, because unquantized numbers are
// exact anyway.
TEST(ResolvedPlanTest, OnlyQuantizedKeysOrValuesHaveExactSinks) {
  const ResolvedPlan plan = Resolve({R"({"exact_sinks":4,
      "key":{"parts":[{"full":{},"stored":"POST_ROPE",
                       "codec":{"bits":{"schedule":[4]},"per_token":{},
                                "param_dtype":"F16"}}]},
      "value":{"parts":[{"full":{},"stored":"NO_ROPE",
                         "codec":{"dtype":"BF16"}}]}})"});
  EXPECT_EQ(plan.attention_of(0).key.exact_sinks, 4);
  EXPECT_EQ(plan.attention_of(0).value.exact_sinks, 0);
}

TEST(ResolvedPlanTest, ARankHoldsTheGroupsThatContainItsHeads) {
  const std::string key = R"({"low_rank":{"groups":[{"heads":[0,2],"rank":9},
      {"heads":[3,1],"rank":6}]},"uses":[{"reconstruct":{}}],
      "stored":"PRE_ROPE","codec":{"dtype":"BF16"}})";
  const ResolvedPlan plan =
      Resolve({Layer(key, kFullValue)}, Shape(), {.rank = 3, .size = 4});
  EXPECT_EQ(plan.kv_heads, (HeadRange{3, 1}));
  EXPECT_EQ(plan.query_heads, (HeadRange{6, 2}));
  const ResolvedPart& part = plan.attention_of(0).key.parts[0];
  EXPECT_FALSE(part.Holds(part.latents[0], plan.kv_heads));
  EXPECT_TRUE(part.Holds(part.latents[1], plan.kv_heads));
  AttentionShape odd = Shape();
  odd.num_heads = 4;
  EXPECT_THAT(
      ResolvePlan(Parse({Layer(key, kFullValue)}), odd, {0, 8}),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("4 query heads cannot be divided equally among 8")));
}

constexpr char kEviction[] =
    R"(,"eviction":{"budget":64,"recent":16,"positions":"ORIGINAL",
       "every_tokens":8})";
using Units = std::vector<std::vector<int64_t>>;

// Returns the eviction units of a plan in which each KV head has its own
// bfloat16 latents for key and value.
Units UnitsOfHeads(int64_t num_heads, int64_t head_dim, TpShard shard = {}) {
  AttentionShape shape = Shape();
  shape.num_heads = shape.num_kv_heads = num_heads;
  shape.head_dim = shape.rotary_dim = head_dim;
  const ResolvedPlan plan =
      Resolve({Layer(kFullKey, kFullValue, kEviction)}, shape, shard);
  return plan.layer(0).eviction->units;
}

// A slot of H heads with d dimensions each has 4 H d bytes. A unit has 8 bytes
// of metadata if neither side stores codes. So the metadata is below 5 % if
// there are fewer than H d / 40 units.
TEST(ResolvedPlanTest,
     EvictionUnitsAreMergedUntilTheirMetadataIsBelowFivePercent) {
  for (const TpShard shard : {TpShard{0, 1}, TpShard{1, 2}}) {
    EXPECT_EQ(UnitsOfHeads(8, 42, shard),
              (Units{{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}}));
    // The metadata would be exactly 5 %, but must be less.
    EXPECT_EQ(UnitsOfHeads(8, 40, shard),
              (Units{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
    EXPECT_EQ(UnitsOfHeads(8, 16, shard), (Units{{0, 1, 2, 3}, {4, 5, 6, 7}}));
    EXPECT_EQ(UnitsOfHeads(8, 8, shard), (Units{{0, 1, 2, 3, 4, 5, 6, 7}}));
  }
}

TEST(ResolvedPlanTest, MergingEvictionUnitsLeavesAnOddLastUnitUnchanged) {
  EXPECT_EQ(UnitsOfHeads(5, 32), (Units{{0, 1}, {2, 3}, {4}}));
  EXPECT_EQ(UnitsOfHeads(7, 32), (Units{{0, 1}, {2, 3}, {4, 5}, {6}}));
  EXPECT_EQ(UnitsOfHeads(7, 16), (Units{{0, 1, 2, 3}, {4, 5, 6}}));
  // 5 units are halved to 3, and then to 2.
  EXPECT_EQ(UnitsOfHeads(5, 22), (Units{{0, 1, 2, 3}, {4}}));
  EXPECT_EQ(UnitsOfHeads(3, 8), (Units{{0, 1, 2}}));
}

std::string Grouped(const char* groups, const char* stored) {
  return absl::StrCat(R"({"low_rank":{"groups":[)", groups,
                      R"(]},"uses":[{"reconstruct":{}}],"stored":")", stored,
                      R"(","codec":{"dtype":"F32"}})");
}

// Shared latents join the heads into the units {0, 3, 4}, {1}, {2} and {5}. In
// a slot of 512 bytes, the metadata of 2 units is small enough.
TEST(ResolvedPlanTest, EvictionUnitsAreMergedInTheOrderOfTheirFirstHeads) {
  AttentionShape shape = Shape();
  shape.num_heads = shape.num_kv_heads = 6;
  const std::string key =
      Grouped(R"({"heads":[0,4],"rank":16},{"heads":[1],"rank":12},
                 {"heads":[2],"rank":12},{"heads":[3],"rank":12},
                 {"heads":[5],"rank":12})",
              "PRE_ROPE");
  const std::string value =
      Grouped(R"({"heads":[3,4],"rank":16},{"heads":[0],"rank":12},
                 {"heads":[1],"rank":12},{"heads":[2],"rank":12},
                 {"heads":[5],"rank":12})",
              "NO_ROPE");
  const ResolvedPlan plan = Resolve({Layer(key, value, kEviction)}, shape);
  EXPECT_EQ(plan.layer(0).eviction->units, (Units{{0, 1, 3, 4}, {2, 5}}));
}

// A rank with heads 0 and 1 could treat them as two units. But both share
// latents with head 2, so they form one unit, on every rank.
TEST(ResolvedPlanTest, EveryRankHasTheEvictionUnitsOfTheWholeModel) {
  const std::string layer =
      Layer(Grouped(R"({"heads":[0,2],"rank":30},{"heads":[1],"rank":16},
                       {"heads":[3],"rank":16})",
                    "PRE_ROPE"),
            Grouped(R"({"heads":[1,2],"rank":30},{"heads":[0],"rank":16},
                       {"heads":[3],"rank":16})",
                    "NO_ROPE"),
            kEviction);
  for (const TpShard shard : {TpShard{0, 1}, TpShard{0, 2}, TpShard{1, 2}}) {
    const ResolvedPlan plan = Resolve({layer}, Shape(), shard);
    ASSERT_TRUE(plan.layer(0).eviction.has_value());
    EXPECT_THAT(plan.layer(0).eviction->units,
                ElementsAre(ElementsAre(0, 1, 2), ElementsAre(3)));
    EXPECT_EQ(plan.page_groups[0].eviction,
              (EvictionCounts{.budget_tokens = 64, .every_tokens = 8}));
  }
}

TEST(ResolvedPlanTest,
     ABudgetThatIsAShareOfThePromptHoldsAtLeastSinksAndRecentTokens) {
  const ResolvedPlan plan = Resolve({Layer(
      kFullKey, kFullValue,
      R"(,"eviction":{"budget_ratio":0.5,"recent":16,"positions":"ORIGINAL",
         "sinks":4,"every_tokens":8})")});
  EXPECT_EQ(plan.page_groups[0].eviction,
            (EvictionCounts{
                .budget_ratio = 0.5, .least_tokens = 20, .every_tokens = 8}));
}

TEST(
    ResolvedPlanTest,
    LayersWithDifferentEvictionSettingsShareAPageGroupIfTheyKeepEquallyManySlots) {
  constexpr char kTo64[] =
      R"(,"eviction":{"budget":64,"recent":16,"positions":"ORIGINAL",
         "every_tokens":8,"lambda":0.5)";
  AttentionShape shape = Shape();
  shape.layers.resize(3);
  const ResolvedPlan plan = Resolve(
      {Layer(kFullKey, kFullValue,
             absl::StrCat(kTo64, R"(,"observation_window":8})")),
       Layer(kFullKey, kFullValue),
       Layer(kFullKey, kFullValue,
             absl::StrCat(kTo64,
                          R"(,"sinks":4,"decay":0.5,"half_friendliness":true,
                             "observation_window":8,"others":"LATEST"})"))},
      shape);
  // These layers hold the same number of slots at any length, so they share a
  // page group.
  ASSERT_EQ(plan.page_groups.size(), 2u);
  EXPECT_THAT(plan.page_groups[0].layers, ElementsAre(0, 2));
  EXPECT_EQ(plan.page_groups[0].eviction.observation_window, 8);
  EXPECT_EQ(plan.page_groups[1].eviction, EvictionCounts());
  const ResolvedEviction& first = *plan.layer(0).eviction;
  EXPECT_EQ(first.recent, 16);
  EXPECT_EQ(first.lambda, 0.5F);
  EXPECT_EQ(first.decay, 1.0F);
  EXPECT_EQ(first.friendliness, 1.0F);
  EXPECT_TRUE(first.scored);
  const ResolvedEviction& other = *plan.layer(2).eviction;
  EXPECT_EQ(other.sinks, 4);
  EXPECT_EQ(other.decay, 0.5F);
  EXPECT_EQ(other.friendliness, 0.5F);
  EXPECT_FALSE(other.scored);
  // ResolveLayerEviction must give the same result for a single layer.
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const std::optional<LayerEviction> layer_eviction,
      ResolveLayerEviction(plan.source.layers(2), shape, 2));
  ASSERT_TRUE(layer_eviction.has_value());
  EXPECT_EQ(layer_eviction->slots.units, other.units);
  EXPECT_EQ(layer_eviction->counts, plan.page_groups[0].eviction);
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const std::optional<LayerEviction> none,
      ResolveLayerEviction(plan.source.layers(1), shape, 1));
  EXPECT_FALSE(none.has_value());
}

TEST(ResolvedPlanTest, RefusesAnInvalidPlan) {
  const int64_t before = NumResolvedPlans();
  EXPECT_THAT(ResolvePlan(KvPlan(), Shape()),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("schema_version")));
  EXPECT_EQ(NumResolvedPlans(), before);
  Resolve({Layer(kFullKey, kFullValue)});
  EXPECT_EQ(NumResolvedPlans(), before + 1);
}

}  // namespace
}  // namespace kvasir::plan
