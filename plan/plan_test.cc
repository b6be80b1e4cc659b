#include "plan/plan.h"

#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "google/protobuf/util/message_differencer.h"

namespace kvasir::plan {
namespace {

using base::StatusIs;
using google::protobuf::util::MessageDifferencer;
using kvasir::v1::BF16;
using kvasir::v1::F32;
using kvasir::v1::KvPlan;
using ::testing::AllOf;
using ::testing::HasSubstr;

// A shape with one layer of 4 KV heads of 16 dimensions, all of which rotate: 8
// RoPE pairs.
AttentionShape Shape() {
  AttentionShape shape;
  shape.num_kv_heads = 4;
  shape.head_dim = 16;
  shape.rotary_dim = 16;
  shape.layers.resize(1);
  return shape;
}

// The same layer, but only half of each head rotates: 4 RoPE pairs and 8
// dimensions that do not rotate.
AttentionShape PartialRotary() {
  AttentionShape shape = Shape();
  shape.rotary_dim = 8;
  return shape;
}

AttentionShape NoRope() {
  AttentionShape shape = Shape();
  shape.layers[0].rope = false;
  return shape;
}

AttentionShape SlidingWindow(int64_t tokens) {
  AttentionShape shape = Shape();
  shape.layers[0].sliding_window = tokens;
  return shape;
}

constexpr char kFullValue[] =
    R"({"full":{},"stored":"NO_ROPE","codec":{"dtype":"BF16"}})";
constexpr char kFullKey[] =
    R"({"full":{},"stored":"POST_ROPE","codec":{"dtype":"BF16"}})";

KvPlan Parse(const std::string& layer) {
  absl::StatusOr<KvPlan> plan = ParsePlanJson(
      absl::StrCat(R"({"schema_version":1,"layers":[{)", layer, "}]}"), "test");
  KVASIR_EXPECT_OK(plan);
  return plan.ok() ? *std::move(plan) : KvPlan();
}

KvPlan PlanOfKeys(const std::string& parts) {
  return Parse(absl::StrCat(R"("key":{"parts":[)", parts,
                            R"(]},"value":{"parts":[)", kFullValue, "]}"));
}

KvPlan PlanOfValues(const std::string& parts) {
  return Parse(absl::StrCat(R"("key":{"parts":[)", kFullKey,
                            R"(]},"value":{"parts":[)", parts, "]}"));
}

KvPlan PlanWith(const std::string& section) {
  return Parse(absl::StrCat(R"("key":{"parts":[)", kFullKey,
                            R"(]},"value":{"parts":[)", kFullValue, "]},",
                            section));
}

// A low_rank part with all heads in one group; `rest` has its other fields.
std::string LowRank(const std::string& rest, int rank = 8) {
  return absl::StrCat(R"({"low_rank":{"groups":[{"heads":[0,1,2,3],"rank":)",
                      rank, "}]},", rest, "}");
}

// A plan whose layer has one joint part, which serves keys and values.
KvPlan JointPlan(const std::string& part, const std::string& rest = "") {
  return Parse(absl::StrCat(R"("joint":[)", LowRank(part), "]", rest));
}

struct Refused {
  const char* name;
  KvPlan plan;
  AttentionShape shape;
  std::vector<std::string> says;
};

void ExpectRefused(const std::vector<Refused>& cases) {
  for (const Refused& c : cases) {
    SCOPED_TRACE(c.name);
    const absl::Status status = ValidatePlan(c.plan, c.shape);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    for (const std::string& text : c.says) {
      EXPECT_THAT(std::string(status.message()), HasSubstr(text));
    }
  }
}

TEST(PlanTest, TheFullRankPlanIsValid) {
  for (const AttentionShape& shape : {Shape(), PartialRotary(), NoRope()}) {
    const KvPlan plan = FullRankPlan(shape, BF16);
    KVASIR_EXPECT_OK(ValidatePlan(plan, shape));
  }
}

TEST(PlanTest, APlanThatIsWrittenAsJsonIsReadBackUnchanged) {
  KvPlan plan = FullRankPlan(Shape(), BF16);
  plan.set_base_model("a model");
  plan.mutable_layers(0)
      ->mutable_value()
      ->mutable_parts(0)
      ->mutable_codec()
      ->set_dtype(F32);
  const std::string text = PlanToJson(plan);
  EXPECT_THAT(text, AllOf(HasSubstr("\"schema_version\": 1"),
                          HasSubstr("\"dtype\": \"BF16\"")));
  EXPECT_EQ(text.back(), '\n');
  KVASIR_ASSERT_OK_AND_ASSIGN(KvPlan back, ParsePlanJson(text, "kv_plan.json"));
  EXPECT_TRUE(MessageDifferencer::Equals(plan, back));
}

TEST(PlanTest, TheErrorForTextThatIsNotAPlanNamesTheFileOrTheWrongField) {
  const auto refused = [](const std::string& text) {
    return ParsePlanJson(text, "dir/kv_plan.json");
  };
  EXPECT_THAT(refused("{"), StatusIs(absl::StatusCode::kInvalidArgument,
                                     HasSubstr("dir/kv_plan.json")));
  EXPECT_THAT(refused(""), StatusIs(absl::StatusCode::kInvalidArgument,
                                    HasSubstr("dir/kv_plan.json")));
  EXPECT_THAT(refused(R"({"schema_version":1,"extra":3})"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("extra")));
  EXPECT_THAT(refused(R"({"schema_version":1,"layers":[{"key":{"parts":[
               {"full":{},"codec":{"dtype":"F12"}}]}}]})"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("F12")));
  EXPECT_THAT(refused(R"({"schema_version":2})"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("must be 1, but is 2")));
  EXPECT_THAT(refused("{}"), StatusIs(absl::StatusCode::kInvalidArgument,
                                      HasSubstr("must be 1, but is 0")));
}

// Regression test: the error contained the whole key, however long it was.
TEST(PlanTest, AParseErrorQuotesAtMost300BytesOfThePlan) {
  const std::string text = "{\"" + std::string(5 << 20, 'k') + "\":1}";
  const absl::Status status = ParsePlanJson(text, "kv_plan.json").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_LT(status.message().size(), 400u);
}

TEST(PlanTest, RefusesAPlanTextAboveTheSizeLimit) {
  const std::string text(static_cast<size_t>(kMaxPlanJsonBytes) + 1, ' ');
  EXPECT_THAT(
      ParsePlanJson(text, "p"),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("has 16777217 bytes, but the limit is 16777216")));
}

TEST(PlanTest, RefusesDeepNestingWithoutACrash) {
  const std::string text(1 << 20, '[');
  EXPECT_THAT(ParsePlanJson(text, "p"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("p: ")));
}

TEST(PlanTest, DataTypesAreFoundByName) {
  for (auto dtype : {kvasir::v1::F32, kvasir::v1::F16, kvasir::v1::BF16}) {
    EXPECT_EQ(*ParseDataType(DataTypeName(dtype)), dtype);
  }
  EXPECT_THAT(ParseDataType("f8"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("want f32, f16 or bf16")));
}

// ---------------------------------------------------------------------------
// Plans of published methods are valid
// ---------------------------------------------------------------------------

TEST(PlanTest, ThePlansOfPublishedCompressionMethodsAreValid) {
  struct Method {
    const char* name;
    KvPlan plan;
    AttentionShape shape;
  };
  const std::vector<Method> methods = {
      {"Palu keys, 3 bits, Hadamard",
       PlanOfKeys(LowRank(R"("uses":[{"reconstruct":{}}],"stored":"PRE_ROPE",
           "codec":{"bits":{"schedule":[3]},"per_token":{},"param_dtype":"F16",
                    "hadamard_fused":{}})")),
       Shape()},
      {"Palu values",
       PlanOfValues(R"({"low_rank":{"groups":[{"heads":[1,0],"rank":20},
           {"heads":[2,3],"rank":32}]},"uses":[{"fold":{}}],"stored":"NO_ROPE",
           "codec":{"dtype":"BF16"}})"),
       Shape()},
      {"RAP", PlanOfKeys(R"({"rope_pairs":{"per_head":[{"pair_indices":[0,2]},
           {"pair_indices":[1,2]},{"pair_indices":[0,7]},
           {"pair_indices":[3,4]}]},"uses":[{"fold":{}}],"stored":"POST_ROPE",
           "codec":{"dtype":"BF16"}})"),
       Shape()},
      {"anchored slow pairs, commuting fast pairs",
       PlanOfKeys(absl::StrCat(
           LowRank(R"("uses":[{"pairs":[4,5,6,7],"anchored":{"block":16,
               "order":1}}],"stored":"PRE_ROPE","codec":{"dtype":"BF16"})"),
           R"(,{"rope_low_rank":{"groups":[{"heads":[0,1,2,3],
               "pairs":[0,1,2,3],"rank_per_pair":[4,2,1,1]}]},
               "uses":[{"at_runtime":{}}],"stored":"POST_ROPE",
               "codec":{"dtype":"BF16"}})")),
       Shape()},
      {"one latent, anchored and reconstructed",
       PlanOfKeys(LowRank(R"("uses":[{"pairs":[0,1,2],"reconstruct":{}},
           {"pairs":[3,4,5,6,7],"anchored":{"block":16,"order":1,
           "coefficients":[1,0.9]}}],"stored":"PRE_ROPE",
           "codec":{"dtype":"BF16"})")),
       Shape()},
      {"partial rotary in two parts",
       PlanOfKeys(absl::StrCat(
           LowRank(R"("uses":[{"fold":{}}],"stored":"NO_ROPE",
                      "codec":{"dtype":"BF16"})"),
           ",", LowRank(R"("uses":[{"pairs":[0,1,2,3],"reconstruct":{}}],
                           "stored":"PRE_ROPE","codec":{"dtype":"BF16"})"))),
       PartialRotary()},
      {"SVDq static",
       PlanOfKeys(R"({"full":{},"stored":"PRE_ROPE","mean":true,"codec":{
           "bits":{"schedule":[8,4,4,2,0,0,0,0]},"channel_static":{},
           "basis_static":{}}})"),
       Shape()},
      {"SVDq online",
       PlanOfKeys(R"({"full":{},"stored":"PRE_ROPE","mean":true,"codec":{
           "bits":{"schedule":[8,4,4,2,0,0,0,0]},"channel_sequence":{},
           "param_dtype":"F16","basis_sequence":{"min_tokens":512}}})"),
       Shape()},
      {"commuting keys with a bias, rolling positions",
       Parse(absl::StrCat(
           R"("key":{"parts":[{"rope_low_rank":{"groups":[{"heads":[0,1,2,3],
           "pairs":[0,1],"rank_per_pair":[2,2]}]},"uses":[{"at_runtime":{}}],
           "stored":"PRE_ROPE","latent_bias":true,"codec":{"dtype":"F16"}}]},
           "value":{"parts":[)",
           kFullValue,
           R"(]},"eviction":{"units":[{"heads":[0,1,2,3]}],"budget":64,
           "sinks":4,"recent":16,"lambda":0.5,"positions":"ROLLING",
           "every_tokens":16})")),
       Shape()},
      {"quantized dense keys with an exact window and selection",
       Parse(absl::StrCat(
           R"("key":{"parts":[{"full":{},"stored":"POST_ROPE","codec":{
           "bits":{"schedule":[4]},"per_token":{"group":8},
           "param_dtype":"F16","hadamard_online":{}}}],"exact_window":32},
           "value":{"parts":[)",
           kFullValue,
           R"(]},"selection":{"chunk_slots":8,"budget":128,"outlier_chunks":2,
           "local":32,"landmark_codec":{"dtype":"BF16"}})")),
       Shape()},
      {"a planned cache: one latent of key and value, runs of bits, sinks",
       JointPlan(R"("uses":[{"reconstruct":{},"serves":"SERVES_KEY"},
           {"at_runtime":{},"serves":"SERVES_VALUE"}],"stored":"PRE_ROPE",
           "codec":{"bits":{"runs":[{"channels":3,"bits":8},
           {"channels":4,"bits":5},{"channels":1,"bits":0}]},
           "channel_static":{}})",
                 R"(,"exact_sinks":4)"),
       Shape()},
      {"codes over a token's norm",
       PlanOfKeys(R"({"full":{},"stored":"POST_ROPE","codec":{
           "bits":{"schedule":[2]},"hadamard_online":{},"param_dtype":"F16",
           "per_token_norm":{"levels":[-1.5,-0.5,0.5,1.5]}}})"),
       Shape()},
      {"a share of the prompt is kept",
       PlanWith(R"("eviction":{"budget_ratio":0.25,"recent":16,"lambda":0.5,
           "positions":"ORIGINAL","every_tokens":16})"),
       Shape()},
      {"low-rank keys without RoPE",
       PlanOfKeys(LowRank(R"("uses":[{"fold":{}}],"stored":"NO_ROPE",
           "codec":{"bits":{"schedule":[2]},"per_token":{},"param_dtype":"F16",
                    "hadamard_online":{}})")),
       NoRope()},
  };
  for (const Method& method : methods) {
    SCOPED_TRACE(method.name);
    KVASIR_EXPECT_OK(ValidatePlan(method.plan, method.shape));
  }
}

// ---------------------------------------------------------------------------
// Refusals of invalid plans
// ---------------------------------------------------------------------------

TEST(PlanTest, RefusesAWrongVersionTargetOrLayerCountAndAMissingPartOrSpace) {
  AttentionShape two_layers = Shape();
  two_layers.layers.resize(2);
  KvPlan other_version = FullRankPlan(Shape(), BF16);
  other_version.set_schema_version(7);
  KvPlan no_number = FullRankPlan(Shape(), BF16);
  no_number.mutable_target()->set_kv_bytes_per_token(
      std::numeric_limits<double>::quiet_NaN());
  ExpectRefused({
      {"layers",
       FullRankPlan(Shape(), BF16),
       two_layers,
       {"the plan's number of layers is 1, but the model's is 2"}},
      {"target", no_number, Shape(), {"target.kv_bytes_per_token", "nan"}},
      {"version", other_version, Shape(), {"must be 1, but is 7"}},
      {"no parts",
       Parse(R"("key":{})"),
       Shape(),
       {"layer 0 key: want 1..16 parts, have 0"}},
      {"no value",
       Parse(absl::StrCat(R"("key":{"parts":[)", kFullKey, "]}")),
       Shape(),
       {"layer 0 value: want 1..16 parts, have 0"}},
      {"no space",
       PlanOfKeys(R"({"stored":"POST_ROPE","uses":[{"fold":{}}],
           "codec":{"dtype":"BF16"}})"),
       Shape(),
       {"layer 0 key part 0: no space"}},
  });
}

TEST(PlanTest, RefusesModelShapesOutOfRange) {
  AttentionShape odd = Shape();
  odd.rotary_dim = 7;
  AttentionShape wide = Shape();
  wide.rotary_dim = 18;
  AttentionShape none;
  AttentionShape huge = Shape();
  huge.num_kv_heads = 1 << 15;
  huge.head_dim = 1 << 15;
  huge.rotary_dim = 0;
  ExpectRefused({
      {"odd", FullRankPlan(odd, BF16), odd, {"but must be even and from 0"}},
      {"wide",
       FullRankPlan(wide, BF16),
       wide,
       {"rotary_dim is 18, but must be even and from 0 to 16 (head_dim)"}},
      {"none",
       FullRankPlan(none, BF16),
       none,
       {"has 0 layers and 0 KV heads with head_dim 0"}},
      {"huge", FullRankPlan(huge, BF16), huge, {"at most 16777216"}},
  });
}

TEST(PlanTest, RefusesGroupsThatDoNotPartitionTheHeads) {
  const auto groups = [](const std::string& list) {
    return PlanOfKeys(
        absl::StrCat(R"({"low_rank":{"groups":[)", list,
                     R"(]},"uses":[{"reconstruct":{}}],"stored":"PRE_ROPE",
           "codec":{"dtype":"BF16"}})"));
  };
  ExpectRefused({
      {"twice",
       groups(R"({"heads":[0,1],"rank":4},{"heads":[1,2,3],"rank":4})"),
       Shape(),
       {"layer 0 key part 0: head 1 is in group 0 and in group 1"}},
      {"missing",
       groups(R"({"heads":[0,1],"rank":4},{"heads":[3],"rank":4})"),
       Shape(),
       {"head 2 is in no group"}},
      {"unknown",
       groups(R"({"heads":[0,1,2,3,4],"rank":4})"),
       Shape(),
       {"group 0 names head 4, but the layer has only 4 KV heads"}},
      {"empty",
       groups(R"({"heads":[0,1,2,3],"rank":4},{"rank":4})"),
       Shape(),
       {"group 1 has no heads"}},
  });
}

TEST(PlanTest, RefusesALatentRankThatIsZeroOrAboveTheDimsOfItsHeads) {
  const std::string rest = R"("uses":[{"reconstruct":{}}],"stored":"PRE_ROPE",
      "codec":{"dtype":"BF16"})";
  KVASIR_EXPECT_OK(ValidatePlan(PlanOfKeys(LowRank(rest, 64)), Shape()));
  const std::string four_pairs =
      R"("uses":[{"pairs":[0,1,2,3],"reconstruct":{}}],"stored":"PRE_ROPE",
      "codec":{"dtype":"BF16"})";
  ExpectRefused({
      {"above",
       PlanOfKeys(LowRank(rest, 65)),
       Shape(),
       {"rank must be 1..64 (4 heads of 16 dims), but is 65"}},
      {"zero", PlanOfKeys(LowRank(rest, 0)), Shape(), {"but is 0"}},
      {"above the pairs",
       PlanOfKeys(LowRank(four_pairs, 33)),
       Shape(),
       {"rank must be 1..32 (4 heads of 8 dims), but is 33"}},
      {"complex rank",
       PlanOfKeys(R"({"rope_low_rank":{"groups":[
           {"heads":[0,1,2,3],"pairs":[0,3],"rank_per_pair":[2,5]}]},
           "uses":[{"fold":{}}],"stored":"POST_ROPE",
           "codec":{"dtype":"BF16"}})"),
       Shape(),
       {"group 0 pair 3: rank must be 1..4", "but is 5"}},
      {"complex rank of a pair that comes again",
       PlanOfKeys(R"({"rope_low_rank":{"groups":[
           {"heads":[0,1,2,3],"pairs":[3,0,3],"rank_per_pair":[2,1,3]}]},
           "uses":[{"fold":{}}],"stored":"POST_ROPE",
           "codec":{"dtype":"BF16"}})"),
       Shape(),
       {"group 0 pair 3: rank must be 1..4", "but is 5"}},
      {"rank per pair",
       PlanOfKeys(R"({"rope_low_rank":{"groups":[
           {"heads":[0,1,2,3],"pairs":[0,3],"rank_per_pair":[2]}]},
           "uses":[{"fold":{}}],"stored":"POST_ROPE",
           "codec":{"dtype":"BF16"}})"),
       Shape(),
       {"has 1 ranks and 2 pairs"}},
  });
}

TEST(PlanTest, RefusesInvalidListsOfRopePairs) {
  const auto pairs = [](const std::string& first) {
    return PlanOfKeys(
        absl::StrCat(R"({"rope_pairs":{"per_head":[{"pair_indices":)", first,
                     R"(},{"pair_indices":[0,1]},{"pair_indices":[0,1]},
        {"pair_indices":[0,1]}]},"uses":[{"fold":{}}],"stored":"POST_ROPE",
        "codec":{"dtype":"BF16"}})"));
  };
  ExpectRefused({
      {"beyond", pairs("[0,8]"), Shape(), {"RoPE pair 8 is not below 8"}},
      {"twice",
       pairs("[1,1]"),
       Shape(),
       {"must be in increasing order, but 1 follows 1"}},
      {"unequal", pairs("[1]"), Shape(), {"head 0 keeps 1 and head 1 keeps 2"}},
      {"none", pairs("[]"), Shape(), {"head 0 keeps 0"}},
      {"no rotation", pairs("[0,1]"), NoRope(), {"want stored NO_ROPE"}},
  });
}

TEST(PlanTest, RefusesDimsThatTwoPartsCover) {
  const std::string half = LowRank(
      R"("uses":[{"pairs":[0,1],"reconstruct":{}}],"stored":"PRE_ROPE",
      "codec":{"dtype":"BF16"})");
  ExpectRefused({
      {"pair",
       PlanOfKeys(absl::StrCat(half, ",", half)),
       Shape(),
       {"part 1", "RoPE pair 0 of head 0: already covered by part 0"}},
      {"full beside",
       PlanOfKeys(absl::StrCat(half, ",", kFullKey)),
       Shape(),
       {"part 1", "must be the only part"}},
      {"beside full",
       PlanOfKeys(absl::StrCat(kFullKey, ",", half)),
       Shape(),
       {"part 1", "already covered by part 0"}},
      {"values",
       PlanOfValues(absl::StrCat(kFullValue, ",", kFullValue)),
       Shape(),
       {"layer 0 value part 1", "must be the only part"}},
  });
}

TEST(PlanTest, RefusesInvalidPartsThatStoreKeysAndValuesJointly) {
  const std::string both = R"("uses":[{"reconstruct":{},"serves":"SERVES_KEY"},
      {"at_runtime":{},"serves":"SERVES_VALUE"}],)";
  const std::string pre = R"("stored":"PRE_ROPE",)";
  const std::string numbers = R"("codec":{"dtype":"BF16"})";
  const std::string key = absl::StrCat(R"(,"key":{"parts":[)", kFullKey, "]}");
  AttentionShape normed = Shape();
  normed.qk_norm = true;
  ExpectRefused({
      {"space",
       Parse(absl::StrCat(R"("joint":[{"full":{},)", pre, numbers, "}]")),
       Shape(),
       {"layer 0 joint part 0: ", "must have a low_rank space"}},
      {"rotated",
       JointPlan(both + R"("stored":"POST_ROPE",)" + numbers),
       Shape(),
       {"want stored PRE_ROPE"}},
      {"no rotation",
       JointPlan(both + pre + numbers),
       NoRope(),
       {"want stored NO_ROPE"}},
      {"of nobody",
       JointPlan(R"("uses":[{"reconstruct":{}}],)" + pre + numbers),
       Shape(),
       {"a use does not state whether it serves key or value"}},
      {"of only the key",
       JointPlan(R"("uses":[{"reconstruct":{},"serves":"SERVES_KEY"}],)" + pre +
                 numbers),
       Shape(),
       {"have 1 and 0"}},
      {"absorbed keys that rotate",
       JointPlan(R"("uses":[{"at_runtime":{},"serves":"SERVES_KEY"},
                    {"at_runtime":{},"serves":"SERVES_VALUE"}],)" +
                 pre + numbers),
       Shape(),
       {"across the rotation"}},
      {"anchored values",
       JointPlan(R"("uses":[{"reconstruct":{},"serves":"SERVES_KEY"},
                    {"anchored":{"block":4},"serves":"SERVES_VALUE"}],)" +
                 pre + numbers),
       Shape(),
       {"ANCHORED is for keys"}},
      {"rank",
       Parse(absl::StrCat(R"("joint":[)", LowRank(both + pre + numbers, 129),
                          "]")),
       Shape(),
       {"rank must be 1..128 (4 heads of 32 dims), but is 129"}},
      {"covered by a side too",
       JointPlan(both + pre + numbers, key),
       Shape(),
       {"layer 0 joint part 0: ", "already covered by part 0"}},
      {"covered twice",
       Parse(absl::StrCat(R"("joint":[)", LowRank(both + pre + numbers), ",",
                          LowRank(both + pre + numbers), "]")),
       Shape(),
       {"layer 0 joint part 1: ", "already covered by joint part 0"}},
      {"a window of only the key",
       JointPlan(both + pre + R"("codec":{"bits":{"schedule":[4]},
                                 "per_token":{},"param_dtype":"F16"})",
                 R"(,"key":{"exact_window":8})"),
       Shape(),
       {"layer 0 joint: ", "one exact_window, have 8 for the key and 0"}},
      {"QK-norm", JointPlan(both + pre + numbers), normed, {"QK-norm"}},
      {"codec",
       JointPlan(both + R"("stored":"PRE_ROPE")"),
       Shape(),
       {"layer 0 joint part 0: codec: want a dtype or bits"}},
      {"sinks beside numbers",
       JointPlan(both + pre + numbers, R"(,"exact_sinks":4)"),
       Shape(),
       {"layer 0 exact_sinks: ", "no part stores codes"}},
      {"a use of the other side",
       PlanOfKeys(LowRank(R"("uses":[{"reconstruct":{},
                             "serves":"SERVES_VALUE"}],)" +
                          pre + numbers)),
       Shape(),
       {"layer 0 key part 0: a use serves the other side"}},
  });
}

TEST(PlanTest, RefusesLiftsThatDoNotSuitTheSpaceAndTheStoredField) {
  const auto low_rank = [](const std::string& stored, const std::string& lift) {
    return PlanOfKeys(
        LowRank(absl::StrCat(R"("uses":[{")", lift, R"(":{}}],"stored":")",
                             stored, R"(","codec":{"dtype":"BF16"})")));
  };
  const std::string anchored =
      R"("uses":[{"anchored":{"block":16,"order":1}}],"stored":"POST_ROPE",
      "codec":{"dtype":"BF16"})";
  ExpectRefused({
      {"fold",
       low_rank("PRE_ROPE", "fold"),
       Shape(),
       {"FOLD would move the lift across the rotation"}},
      {"at_runtime",
       low_rank("PRE_ROPE", "at_runtime"),
       Shape(),
       {"AT_RUNTIME would move"}},
      {"fold after",
       low_rank("POST_ROPE", "fold"),
       Shape(),
       {"FOLD into q_proj"}},
      {"anchored after",
       PlanOfKeys(LowRank(anchored)),
       Shape(),
       {"ANCHORED", "must be stored PRE_ROPE"}},
      {"no lift",
       PlanOfKeys(LowRank(R"("uses":[{}],"stored":"PRE_ROPE",
           "codec":{"dtype":"BF16"})")),
       Shape(),
       {"one of the uses has no lift"}},
      {"one folds and one does not",
       PlanOfKeys(R"({"rope_low_rank":{"groups":[{"heads":[0,1,2,3],
           "pairs":[0,1],"rank_per_pair":[1,1]}]},"stored":"POST_ROPE",
           "uses":[{"pairs":[0],"fold":{}},{"pairs":[1],"at_runtime":{}}],
           "codec":{"dtype":"BF16"}})"),
       Shape(),
       {"FOLD cannot be combined with another lift: 1 of 2 uses"}},
      {"two uses of RoPE pairs",
       PlanOfKeys(R"({"rope_low_rank":{"groups":[{"heads":[0,1,2,3],
           "pairs":[0,1],"rank_per_pair":[1,1]}]},"stored":"POST_ROPE",
           "uses":[{"fold":{}},{"fold":{}}],"codec":{"dtype":"BF16"}})"),
       Shape(),
       {"one use", "it has 2 uses, and the first lists 0 RoPE pairs"}},
      {"a use of pairs that are not kept",
       PlanOfKeys(R"({"rope_pairs":{"per_head":[{"pair_indices":[0]},
           {"pair_indices":[0]},{"pair_indices":[0]},{"pair_indices":[0]}]},
           "stored":"POST_ROPE","uses":[{"pairs":[5],"fold":{}}],
           "codec":{"dtype":"BF16"}})"),
       Shape(),
       {"one use", "it has 1 uses, and the first lists 1 RoPE pairs"}},
      {"no use",
       PlanOfKeys(LowRank(R"("stored":"PRE_ROPE",
           "codec":{"dtype":"BF16"})")),
       Shape(),
       {"no uses"}},
      {"lifted full",
       PlanOfKeys(R"({"full":{},"uses":[{"fold":{}}],
           "stored":"POST_ROPE","codec":{"dtype":"BF16"}})"),
       Shape(),
       {"nothing to lift"}},
      {"anchored values",
       PlanOfValues(LowRank(R"("uses":[{"anchored":{"block":16}}],
           "stored":"NO_ROPE","codec":{"dtype":"BF16"})")),
       Shape(),
       {"ANCHORED is for keys"}},
      {"coefficients",
       PlanOfKeys(LowRank(R"("uses":[{"pairs":[0,1,2],"anchored":{"block":16,
           "order":1,"coefficients":[1,2,3]}}],"stored":"PRE_ROPE",
           "codec":{"dtype":"BF16"})")),
       Shape(),
       {"needs 0 (Taylor), 2 or 6 coefficients, but has 3"}},
      {"block",
       PlanOfKeys(LowRank(R"("uses":[{"anchored":{"order":1}}],
           "stored":"PRE_ROPE","codec":{"dtype":"BF16"})")),
       Shape(),
       {"block >= 1"}},
  });
}

TEST(PlanTest, RefusesInvalidValuesOfTheStoredField) {
  const auto full = [](const std::string& stored) {
    return PlanOfKeys(
        absl::StrCat(R"({"full":{},)", stored, R"("codec":{"dtype":"BF16"}})"));
  };
  ExpectRefused({
      {"unsaid", full(""), Shape(), {"want PRE_ROPE, POST_ROPE or NO_ROPE"}},
      {"rotates",
       full(R"("stored":"NO_ROPE",)"),
       Shape(),
       {"the layer rotates its keys"}},
      {"does not",
       full(R"("stored":"POST_ROPE",)"),
       NoRope(),
       {"the layer has no RoPE"}},
      {"values",
       PlanOfValues(R"({"full":{},"stored":"POST_ROPE",
           "codec":{"dtype":"BF16"}})"),
       Shape(),
       {"values do not rotate"}},
      {"nothing left",
       PlanOfKeys(LowRank(R"("uses":[{"fold":{}}],"stored":"NO_ROPE",
           "codec":{"dtype":"BF16"})")),
       Shape(),
       {"all 16 dims rotate"}},
      {"enum", full(R"("stored":9,)"), Shape(), {"have 9"}},
  });
}

TEST(PlanTest, RefusesLowRankKeysIfTheModelNormalizesKeys) {
  AttentionShape shape = Shape();
  shape.qk_norm = true;
  KVASIR_EXPECT_OK(ValidatePlan(FullRankPlan(shape, BF16), shape));
  ExpectRefused({{"low rank",
                  PlanOfKeys(LowRank(R"("uses":[{"reconstruct":{}}],
                      "stored":"PRE_ROPE","codec":{"dtype":"BF16"})")),
                  shape,
                  {"QK-norm"}}});
}

TEST(PlanTest, RefusesCodecsWithContradictorySettings) {
  const auto codec = [](const std::string& text) {
    return PlanOfKeys(absl::StrCat(
        R"({"full":{},"stored":"POST_ROPE","codec":{)", text, "}}"));
  };
  const auto bits = [&codec](const std::string& schedule) {
    return codec(absl::StrCat(R"("bits":{"schedule":)", schedule,
                              R"(},"per_token":{},"param_dtype":"F16")"));
  };
  const auto runs = [&codec](const std::string& list) {
    return codec(absl::StrCat(R"("bits":{"runs":[)", list,
                              R"(]},"per_token":{},"param_dtype":"F16")"));
  };
  const auto norm = [&codec](const std::string& levels) {
    return codec(absl::StrCat(R"("bits":{"schedule":[2]},"param_dtype":"F16",)",
                              R"("per_token_norm":{"levels":)", levels, "}"));
  };
  ExpectRefused({
      {"nothing", codec(""), Shape(), {"want a dtype or bits"}},
      {"dtype", codec(R"("dtype":0)"), Shape(), {"want F32, F16 or BF16"}},
      {"unknown dtype", codec(R"("dtype":77)"), Shape(), {"have 77"}},
      {"scaled numbers",
       codec(R"("dtype":"F16","per_token":{})"),
       Shape(),
       {"so they must have no range"}},
      {"two entries", bits("[4,4]"), Shape(), {"1 or 8 entries, have 2"}},
      {"seven bits", bits("[7]"), Shape(), {"0 to 6 or 8, but are 7"}},
      {"no bits", bits("[0]"), Shape(), {"stores nothing"}},
      {"no order",
       bits("[8,4,4,2,0,0,0,0]"),
       Shape(),
       {"falling singular value"}},
      {"no range",
       codec(R"("bits":{"schedule":[4]})"),
       Shape(),
       {"the codec has bits but no range"}},
      {"no params",
       codec(R"("bits":{"schedule":[4]},"per_token":{})"),
       Shape(),
       {"param_dtype"}},
      {"schedule and runs",
       bits(R"([4],"runs":[{"channels":16,"bits":4}])"),
       Shape(),
       {"want a schedule or runs, have both"}},
      {"an empty run",
       runs(R"({"bits":4})"),
       Shape(),
       {"a run has no channels"}},
      {"nine bits",
       runs(R"({"channels":16,"bits":9})"),
       Shape(),
       {"0 to 6 or 8, but are 9"}},
      {"runs too short",
       runs(R"({"channels":8,"bits":4},{"channels":7,"bits":2})"),
       Shape(),
       {"group 0: the runs of bits have 15 channels, but the latent has 16"}},
      {"runs kept apart",
       codec(R"("bits":{"runs":[{"channels":8,"bits":4},{"channels":8,
                "bits":2}]},"per_token":{},"param_dtype":"F16",
                "hadamard_online":{})"),
       Shape(),
       {"mixes the channels that runs of bits keep apart"}},
      {"falling levels",
       norm("[0.5,0.5,1,2]"),
       Shape(),
       {"levels must be finite and increasing"}},
      {"levels that are too close",
       norm("[-1,0.5,0.501,1]"),
       Shape(),
       {"differ by at least 1/127 of the largest magnitude, but levels 1 "
        "and 2 are 0.5 and 0.501"}},
      {"levels",
       norm("[0.5,1]"),
       Shape(),
       {"codes of 2 bits need 4 levels, but the codec has 2"}},
      {"no levels",
       norm("[]"),
       Shape(),
       {"need 4 levels, but the codec has 0"}},
      {"levels of many bits",
       codec(R"("bits":{"schedule":[5]},"param_dtype":"F16",
                "per_token_norm":{"levels":[0,1]})"),
       Shape(),
       {"codes with levels may have at most 4 bits, but have 5"}},
      {"unstored before others",
       runs(R"({"channels":4,"bits":4},{"channels":4,"bits":0},
               {"channels":8,"bits":2})"),
       Shape(),
       {"a run of 2 bits follows a run of 0 bits: runs of 0 bits must come "
        "last"}},
      {"norm's type",
       codec(R"("bits":{"schedule":[2]},"per_token_norm":{})"),
       Shape(),
       {"param_dtype"}},
      {"range group",
       codec(R"("bits":{"schedule":[4]},"per_token":{"group":5},
                "param_dtype":"F16")"),
       Shape(),
       {"ranges of 5 channels do not divide the 16"}},
  });
}

TEST(PlanTest, RefusesTransformsBiasesAndWindowsThatDoNotSuitThePart) {
  const std::string four_bits =
      R"("bits":{"schedule":[4]},"per_token":{},"param_dtype":"F16",)";
  const auto full = [&](const std::string& stored, const std::string& what) {
    return PlanOfKeys(absl::StrCat(R"({"full":{},"stored":")", stored,
                                   R"(","codec":{)", four_bits, what, "}}"));
  };
  const auto low_rank = [](const std::string& codec, int rank = 8) {
    return PlanOfKeys(
        LowRank(absl::StrCat(R"("uses":[{"reconstruct":{}}],"stored":"PRE_ROPE",
                        "codec":{)",
                             codec, "}"),
                rank));
  };
  const std::string eight =
      R"("bits":{"schedule":[8,4,4,2,0,0,0,0]},"per_token":{},
         "param_dtype":"F16")";
  ExpectRefused({
      {"online before",
       full("PRE_ROPE", R"("hadamard_online":{})"),
       Shape(),
       {"HADAMARD_ONLINE", "want POST_ROPE or NO_ROPE"}},
      {"fused into nothing",
       full("POST_ROPE", R"("hadamard_fused":{})"),
       Shape(),
       {"HADAMARD_FUSED is fused into a lift"}},
      {"fused into a complex lift",
       PlanOfKeys(R"({"rope_low_rank":{"groups":[{"heads":[0,1,2,3],
           "pairs":[0],"rank_per_pair":[4]}]},"uses":[{"at_runtime":{}}],
           "stored":"PRE_ROPE","codec":{"dtype":"BF16",
           "hadamard_fused":{}}})"),
       Shape(),
       {"HADAMARD_FUSED would mix", "want HADAMARD_ONLINE"}},
      {"sequence basis after",
       full("POST_ROPE", R"("basis_sequence":{})"),
       Shape(),
       {"BASIS_SEQUENCE", "want PRE_ROPE or NO_ROPE"}},
      {"static ranges of another basis",
       PlanOfKeys(R"({"full":{},"stored":"PRE_ROPE","codec":{
           "bits":{"schedule":[4]},"channel_static":{},"basis_sequence":{}}})"),
       Shape(),
       {"CHANNEL_STATIC ranges do not fit BASIS_SEQUENCE"}},
      {"schedule and Hadamard",
       low_rank(absl::StrCat(eight, R"(,"hadamard_fused":{})")),
       Shape(),
       {"Hadamard transform mixes"}},
      {"width",
       low_rank(eight, 12),
       Shape(),
       {"a multiple of 8, but the width is 12"}},
      {"basis over pairs",
       PlanOfKeys(absl::StrCat(
           R"({"rope_low_rank":{"groups":[{"heads":[0,1,2,3],"pairs":[0],
           "rank_per_pair":[4]}]},"uses":[{"fold":{}}],"stored":"POST_ROPE",
           "codec":{)",
           four_bits, R"("basis_static":{}}})")),
       Shape(),
       {"mixes channels across RoPE pairs"}},
      {"bias of nothing",
       PlanOfKeys(R"({"full":{},"stored":"POST_ROPE","latent_bias":true,
           "codec":{"dtype":"BF16"}})"),
       Shape(),
       {"latent_bias needs a low_rank or rope_low_rank space"}},
      {"window of numbers",
       Parse(absl::StrCat(R"("key":{"exact_window":8,"parts":[)", kFullKey,
                          R"(]},"value":{"parts":[)", kFullValue, "]}")),
       Shape(),
       {"exact_window of 8"}},
  });
}

TEST(PlanTest, SetExactTokensChangesOnlyKeysOrValuesThatAreQuantized) {
  KvPlan plan = FullRankPlan(Shape(), BF16);
  EXPECT_FALSE(SetExactTokens({.sinks = 4, .window = 9}, &plan));
  EXPECT_TRUE(MessageDifferencer::Equals(plan, FullRankPlan(Shape(), BF16)));
  auto* layer = plan.mutable_layers(0);
  auto* codec = layer->mutable_key()->mutable_parts(0)->mutable_codec();
  codec->mutable_bits()->add_schedule(4);
  codec->mutable_channel_static();
  *plan.add_layers() = FullRankPlan(Shape(), BF16).layers(0);
  EXPECT_TRUE(SetExactTokens({.sinks = 4, .window = 9}, &plan));
  EXPECT_EQ(plan.layers(0).exact_sinks(), 4);
  EXPECT_EQ(plan.layers(0).key().exact_window(), 9);
  EXPECT_EQ(plan.layers(0).value().exact_window(), 0);
  EXPECT_EQ(plan.layers(1).exact_sinks(), 0);
  // A field without a value does not change the plan.
  EXPECT_TRUE(SetExactTokens({.window = 0}, &plan));
  EXPECT_EQ(plan.layers(0).exact_sinks(), 4);
  EXPECT_EQ(plan.layers(0).key().exact_window(), 0);
}

TEST(PlanTest, RefusesInvalidEvictionSettings) {
  const auto eviction = [](const std::string& text) {
    return PlanWith(absl::StrCat(R"("eviction":{)", text, "}"));
  };
  ExpectRefused({
      {"no recent",
       eviction(R"("budget":8,"every_tokens":1)"),
       Shape(),
       {"layer 0 eviction: recent must be at least 1 token"}},
      {"never",
       eviction(R"("budget":8,"recent":4)"),
       Shape(),
       {"every_tokens must be at least 1"}},
      {"budget and ratio",
       eviction(R"("budget":8,"budget_ratio":0.5,"recent":6,
                   "every_tokens":1)"),
       Shape(),
       {"want either a budget in slots or a budget_ratio",
        "have a budget of 8 and a budget_ratio of 0.5"}},
      {"ratio",
       eviction(R"("budget_ratio":1.5,"recent":6,"every_tokens":1)"),
       Shape(),
       {"above 0 and at most 1, have a budget of 0 and a budget_ratio of 1.5"}},
      {"budget",
       eviction(R"("budget":8,"recent":6,"sinks":4,"every_tokens":1)"),
       Shape(),
       {"the budget of 8 slots is below sinks + recent = 10"}},
      {"lambda",
       eviction(R"("budget":8,"recent":6,"every_tokens":1,"lambda":1.5)"),
       Shape(),
       {"must be from 0 to 1, but lambda is 1.5"}},
      {"lambda is no number",
       eviction(R"("budget":8,"recent":6,"every_tokens":1,"lambda":"NaN")"),
       Shape(),
       {"must be from 0 to 1, but lambda is nan"}},
      {"ratio is no number",
       eviction(R"("budget_ratio":"NaN","recent":6,"every_tokens":1)"),
       Shape(),
       {"above 0 and at most 1, have a budget of 0 and a budget_ratio of nan"}},
      {"not a number",
       eviction(R"("budget":8,"recent":6,"every_tokens":1,"decay":"NaN")"),
       Shape(),
       {"must be from 0 to 1"}},
      {"positions",
       eviction(R"("budget":8,"recent":6,"every_tokens":1)"),
       Shape(),
       {"want ORIGINAL or ROLLING, have 0"}},
      {"rolling",
       eviction(R"("budget":8,"recent":6,"every_tokens":1,
                   "positions":"ROLLING")"),
       Shape(),
       {"want keys stored PRE_ROPE"}},
      {"others",
       eviction(R"("budget":8,"recent":6,"every_tokens":1,
                   "positions":"ORIGINAL","others":7)"),
       Shape(),
       {"want HITTERS or LATEST, have 7"}},
      {"a sliding window",
       eviction(R"("budget":8,"recent":6,"every_tokens":1,
                   "positions":"ORIGINAL")"),
       SlidingWindow(32),
       {"layer 0 eviction: the layer has a sliding window of 32 tokens"}},
      {"units",
       eviction(R"("budget":8,"recent":6,"every_tokens":1,
                   "positions":"ORIGINAL","units":[{"heads":[0,1,2]}])"),
       Shape(),
       {"layer 0 eviction: head 3 is in no group"}},
  });
  KvPlan straddled = PlanOfValues(LowRank(
      R"("uses":[{"fold":{}}],"stored":"NO_ROPE","codec":{"dtype":"BF16"})"));
  auto* plan = straddled.mutable_layers(0)->mutable_eviction();
  plan->set_budget(8);
  plan->set_recent(4);
  plan->set_every_tokens(1);
  plan->set_positions(kvasir::v1::Eviction::ORIGINAL);
  for (uint32_t head = 0; head < 4; ++head) plan->add_units()->add_heads(head);
  KvPlan one_basis = PlanOfKeys(
      R"({"full":{},"stored":"PRE_ROPE","codec":{"bits":{"schedule":[4]},
          "channel_static":{},"basis_static":{}}})");
  *one_basis.mutable_layers(0)->mutable_eviction() = *plan;
  ExpectRefused(
      {{"straddled",
        straddled,
        Shape(),
        {"heads that share a latent must also share an eviction unit"}},
       {"a basis of all heads",
        one_basis,
        Shape(),
        {"heads that share a latent must also share an eviction unit"}}});
}

// Tokens that are stored exactly must not be evicted, because their place in
// the cache follows from their position.
TEST(PlanTest, RefusesEvictionOfTokensThatMustBeStoredExactly) {
  KvPlan exact = PlanOfKeys(R"({"full":{},"stored":"POST_ROPE","codec":{
      "bits":{"schedule":[4]},"per_token":{},"param_dtype":"F16"}})");
  exact.mutable_layers(0)->mutable_key()->set_exact_window(32);
  exact.mutable_layers(0)->set_exact_sinks(4);
  auto* eviction = exact.mutable_layers(0)->mutable_eviction();
  eviction->set_budget(64);
  eviction->set_sinks(4);
  eviction->set_recent(32);
  eviction->set_every_tokens(16);
  eviction->set_positions(kvasir::v1::Eviction::ORIGINAL);
  KVASIR_EXPECT_OK(ValidatePlan(exact, Shape()));
  KvPlan recent = exact;
  recent.mutable_layers(0)->mutable_eviction()->set_recent(31);
  KvPlan sinks = exact;
  sinks.mutable_layers(0)->mutable_eviction()->set_sinks(3);
  ExpectRefused(
      {{"window",
        recent,
        Shape(),
        {"eviction must keep the exact_window of 32 tokens, but "
         "recent is only 31"}},
       {"sinks",
        sinks,
        Shape(),
        {"eviction must keep the 4 exact_sinks, but sinks is only 3"}}});
}

TEST(PlanTest, RefusesInvalidSelectionSettings) {
  const auto selection = [](const std::string& text) {
    return PlanWith(absl::StrCat(R"("selection":{)", text, "}"));
  };
  ExpectRefused({
      {"chunk",
       selection(R"("budget":8)"),
       Shape(),
       {"layer 0 selection: chunk_slots must be at least 1"}},
      {"budget",
       selection(R"("chunk_slots":8,"budget":20,"outlier_chunks":2,"local":8)"),
       Shape(),
       {"the budget of 20 slots", "24"}},
      {"landmarks",
       selection(R"("chunk_slots":8,"budget":20)"),
       Shape(),
       {"layer 0 selection: codec: want a dtype or bits"}},
      {"transform",
       selection(R"("chunk_slots":8,"budget":20,"landmark_codec":{
           "dtype":"BF16","hadamard_online":{}})"),
       Shape(),
       {"no transform"}},
  });
}

}  // namespace
}  // namespace kvasir::plan
