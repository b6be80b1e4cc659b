#include "model/checkpoint/plan_tensors.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_matchers.h"
#include "google/protobuf/util/json_util.h"

namespace kvasir::model {
namespace {

using base::StatusIs;
using kvasir::v1::LayerPlan;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// A model with one layer, M = 24, and 4 query heads and 2 KV heads of 8
// dimensions, all of which rotate (4 RoPE pairs).
DecoderSpec Spec() {
  DecoderSpec spec;
  spec.hidden_size = 24;
  spec.num_heads = 4;
  spec.num_kv_heads = 2;
  spec.head_dim = 8;
  spec.intermediate_size = 20;
  spec.vocab_size = 30;
  spec.rope.rotary_dim = 8;
  spec.layers.resize(1);
  return spec;
}

DecoderSpec WithBiases() {
  DecoderSpec spec = Spec();
  spec.qkv_bias = true;
  return spec;
}

constexpr char kFull[] = R"({"full":{},"codec":{"dtype":"BF16"}})";

LayerPlan Layer(const std::string& key_parts, const std::string& value_parts) {
  LayerPlan plan;
  const std::string json =
      absl::StrCat(R"({"key":{"parts":[)", key_parts,
                   R"(]},"value":{"parts":[)", value_parts, "]}}");
  const auto status = google::protobuf::util::JsonStringToMessage(json, &plan);
  EXPECT_TRUE(status.ok()) << status.ToString() << json;
  return plan;
}

absl::StatusOr<plan::AttentionTensors> DescribeAttention(
    const DecoderSpec& spec, const LayerPlan& layer) {
  const plan::AttentionShape shape = AttentionShapeOf(spec);
  const auto attention = plan::ResolveAttention(layer, shape, 0);
  if (!attention.ok()) return attention.status();
  return plan::TensorsOf(*attention, shape, 0);
}

// Lists the tensors as text, like "k_proj.down.weight [5, 24]", followed by
// "F32" if only that type is allowed.
std::vector<std::string> Listed(const plan::AttentionTensors& attention) {
  std::vector<std::string> lines;
  for (const RequiredTensor& tensor : attention.tensors) {
    const std::string prefix = "self_attn.";
    EXPECT_TRUE(tensor.name.starts_with(prefix)) << tensor.name;
    lines.push_back(absl::StrCat(tensor.name.substr(prefix.size()), " [",
                                 absl::StrJoin(tensor.shape, ", "), "]",
                                 tensor.f32_only ? " F32" : ""));
  }
  return lines;
}

std::vector<std::string> Listed(const DecoderSpec& spec,
                                const std::string& key_parts,
                                const std::string& value_parts) {
  const auto attention = DescribeAttention(spec, Layer(key_parts, value_parts));
  EXPECT_TRUE(attention.ok()) << attention.status();
  return attention.ok() ? Listed(*attention) : std::vector<std::string>();
}

// The JSON of a low_rank part with one group for each of the two KV heads; the
// groups have ranks 3 and 2.
std::string LowRank(const std::string& lift, const std::string& stored,
                    const std::string& rest = R"("codec":{"dtype":"BF16"})") {
  return absl::StrCat(R"({"low_rank":{"groups":[{"heads":[1],"rank":3},)",
                      R"({"heads":[0],"rank":2}]},"uses":[{")", lift,
                      R"(":{}}],"stored":")", stored, "\",", rest, "}");
}

TEST(PlanTensorsTest, AnUncompressedPlanNeedsTheModelsOwnTensors) {
  for (DecoderSpec spec : {Spec(), WithBiases()}) {
    for (const bool more : {false, true}) {
      spec.o_bias = more;
      spec.mlp_bias = more;
      spec.tied_head = more;
      spec.layers.resize(3);
      const plan::AttentionShape shape = AttentionShapeOf(spec);
      KVASIR_ASSERT_OK_AND_ASSIGN(
          const plan::ResolvedPlan plan,
          plan::ResolvePlan(plan::FullRankPlan(shape, kvasir::v1::BF16),
                            shape));
      KVASIR_ASSERT_OK_AND_ASSIGN(const auto tensors,
                                  RequiredTensors(spec, plan));
      EXPECT_EQ(tensors, RequiredTensors(spec));
    }
  }
}

TEST(PlanTensorsTest, ListsTensorsOfRebuiltLowRankKeysAndFoldedValues) {
  EXPECT_THAT(
      Listed(Spec(), LowRank("reconstruct", "PRE_ROPE"),
             LowRank("fold", "NO_ROPE")),
      ElementsAre("q_proj.weight [32, 24]", "k_proj.down.weight [5, 24]",
                  "k_proj.up.0.weight [8, 3]", "k_proj.up.1.weight [8, 2]",
                  "v_proj.down.weight [5, 24]",
                  // Query heads 0 and 1 use KV head 0, which has rank 2.
                  "o_proj.weight [24, 10]"));
}

TEST(PlanTensorsTest,
     LowRankValuesLiftedAtRuntimeLeaveTheOutputProjectionUnchanged) {
  EXPECT_THAT(
      Listed(Spec(), kFull, LowRank("at_runtime", "NO_ROPE")),
      ElementsAre("q_proj.weight [32, 24]", "k_proj.weight [16, 24]",
                  "v_proj.down.weight [5, 24]", "v_proj.up.0.weight [8, 3]",
                  "v_proj.up.1.weight [8, 2]", "o_proj.weight [24, 32]"));
}

TEST(PlanTensorsTest, ASingleGroupOfAllHeadsHasOneLiftTensor) {
  const std::string part =
      R"({"low_rank":{"groups":[{"heads":[0,1],"rank":7}]},
          "uses":[{"at_runtime":{}}],"codec":{"dtype":"F16"}})";
  EXPECT_THAT(Listed(Spec(), kFull, part),
              Contains("v_proj.up.0.weight [16, 7]"));
}

TEST(PlanTensorsTest, ListsBiasesOfLowRankKeysAndValues) {
  const std::string with_latent_bias =
      R"("latent_bias":true,"codec":{"dtype":"BF16"})";
  EXPECT_THAT(
      Listed(WithBiases(), LowRank("reconstruct", "PRE_ROPE", with_latent_bias),
             LowRank("fold", "NO_ROPE", with_latent_bias)),
      ElementsAre("q_proj.weight [32, 24]", "q_proj.bias [32]",
                  "k_proj.down.weight [5, 24]", "k_proj.down.bias [5]",
                  "k_proj.up.0.weight [8, 3]", "k_proj.up.1.weight [8, 2]",
                  "k_proj.up.bias [16]", "v_proj.down.weight [5, 24]",
                  "v_proj.down.bias [5]", "o_proj.weight [24, 10]",
                  "o_proj.bias [24]"));
}

TEST(PlanTensorsTest, TheMeanOfLowRankKeysOrValuesIsStoredAsABias) {
  const std::string mean = R"("mean":true,"codec":{"dtype":"BF16"})";
  const auto tensors = Listed(Spec(), LowRank("reconstruct", "PRE_ROPE", mean),
                              LowRank("at_runtime", "NO_ROPE", mean));
  EXPECT_THAT(tensors, Contains("k_proj.up.bias [16]"));
  EXPECT_THAT(tensors, Contains("o_proj.bias [24]"));
  EXPECT_THAT(tensors, Not(Contains(HasSubstr("v_proj.up.bias"))));
}

TEST(PlanTensorsTest,
     AnOutputBiasIsRequiredOnlyIfTheModelOrTheFoldedValuesHaveABias) {
  DecoderSpec spec = WithBiases();
  EXPECT_THAT(Listed(spec, kFull, kFull),
              Not(Contains(HasSubstr("o_proj.bias"))));
  EXPECT_THAT(Listed(spec, LowRank("reconstruct", "PRE_ROPE"), kFull),
              Not(Contains(HasSubstr("o_proj.bias"))));
  spec.qkv_bias = false;
  EXPECT_THAT(Listed(spec, kFull, LowRank("fold", "NO_ROPE")),
              Not(Contains(HasSubstr("o_proj.bias"))));
  spec.o_bias = true;
  EXPECT_THAT(Listed(spec, kFull, LowRank("fold", "NO_ROPE")),
              Contains("o_proj.bias [24]"));
}

TEST(PlanTensorsTest, ALowRankKeyThatIsFoldedIntoQueriesHasNoBias) {
  DecoderSpec spec = WithBiases();
  spec.layers[0].rope = false;
  EXPECT_THAT(
      Listed(spec, LowRank("at_runtime", "NO_ROPE"), kFull),
      ElementsAre("q_proj.weight [32, 24]", "q_proj.bias [32]",
                  "k_proj.down.weight [5, 24]", "k_proj.up.0.weight [8, 3]",
                  "k_proj.up.1.weight [8, 2]", "v_proj.weight [16, 24]",
                  "v_proj.bias [16]", "o_proj.weight [24, 32]"));
  EXPECT_THAT(
      Listed(spec, LowRank("fold", "NO_ROPE"), kFull),
      ElementsAre("q_proj.weight [10, 24]", "q_proj.bias [10]",
                  "k_proj.down.weight [5, 24]", "v_proj.weight [16, 24]",
                  "v_proj.bias [16]", "o_proj.weight [24, 32]"));
}

TEST(PlanTensorsTest,
     TensorsOfAPartThatKeepsSomeRopePairsHaveOnlyTheRowsOfThesePairs) {
  const auto part = [](const std::string& lift) {
    return absl::StrCat(
        R"({"rope_pairs":{"per_head":[{"pair_indices":[0,1,3]},)",
        R"({"pair_indices":[1,2,3]}]},"stored":"POST_ROPE","uses":[{")", lift,
        R"(":{}}],"codec":{"dtype":"BF16"}})");
  };
  EXPECT_THAT(Listed(WithBiases(), part("fold"), kFull),
              ElementsAre("q_proj.weight [24, 24]", "q_proj.bias [24]",
                          "k_proj.weight [12, 24]", "k_proj.bias [12]",
                          "v_proj.weight [16, 24]", "v_proj.bias [16]",
                          "o_proj.weight [24, 32]"));
  EXPECT_THAT(Listed(Spec(), part("at_runtime"), kFull),
              ElementsAre("q_proj.weight [32, 24]", "k_proj.weight [12, 24]",
                          "v_proj.weight [16, 24]", "o_proj.weight [24, 32]"));
}

TEST(PlanTensorsTest, RopeLowRankTensorsHaveTwoRowsForEachComplexChannel) {
  const auto part = [](const std::string& lift) {
    return absl::StrCat(
        R"({"rope_low_rank":{"groups":[{"heads":[0,1],"pairs":[0,2,3],)",
        R"("rank_per_pair":[2,1,1]}]},"stored":"POST_ROPE","uses":[{")", lift,
        R"(":{}}],"latent_bias":true,"codec":{"dtype":"BF16"}})");
  };
  EXPECT_THAT(
      Listed(WithBiases(), part("at_runtime"), kFull),
      ElementsAre("q_proj.weight [32, 24]", "q_proj.bias [32]",
                  "k_proj.down.weight [8, 24]", "k_proj.down.bias [8]",
                  "k_proj.up.0.weight [2, 2, 4]", "v_proj.weight [16, 24]",
                  "v_proj.bias [16]", "o_proj.weight [24, 32]"));
  const auto folded = Listed(Spec(), part("fold"), kFull);
  // 4 query heads * 4 complex channels * 2 numbers
  EXPECT_THAT(folded, Contains("q_proj.weight [32, 24]"));
  EXPECT_THAT(folded, Not(Contains(HasSubstr("up."))));
}

TEST(PlanTensorsTest,
     TheNamesOfTensorsContainThePartNumberIfKeysOrValuesHaveSeveralParts) {
  DecoderSpec spec = Spec();
  spec.rope.rotary_dim = 4;  // 2 pairs, and 4 dims that do not rotate
  const std::string pairs =
      R"({"rope_pairs":{"per_head":[{"pair_indices":[1]},
          {"pair_indices":[0]}]},"stored":"PRE_ROPE","uses":[{"fold":{}}],
          "codec":{"bits":{"schedule":[4]},"channel_static":{}}})";
  EXPECT_THAT(
      Listed(spec, absl::StrCat(pairs, ",", LowRank("fold", "NO_ROPE")), kFull),
      // rows of q_proj: two query heads have 2 dims + rank 2, two have 2 dims +
      // rank 3
      ElementsAre("q_proj.weight [18, 24]", "k_proj.part0.weight [4, 24]",
                  "k_proj.part0.range.min [4] F32",
                  "k_proj.part0.range.scale [4] F32",
                  "k_proj.part1.down.weight [5, 24]", "v_proj.weight [16, 24]",
                  "o_proj.weight [24, 32]"));
  // If the second part is lifted at run time instead of folded, the query
  // projection keeps its rows for that part's 4 dims unchanged.
  EXPECT_THAT(
      Listed(spec, absl::StrCat(pairs, ",", LowRank("at_runtime", "NO_ROPE")),
             kFull),
      Contains("q_proj.weight [24, 24]"));  // 4 heads * (2 kept + 4 other dims)
}

TEST(PlanTensorsTest, ABasisTensorHasOnlyTheChannelsWithMoreThanZeroBits) {
  const std::string part =
      R"({"full":{},"stored":"POST_ROPE","mean":true,"codec":{"bits":
          {"schedule":[8,4,4,4,2,2,0,0]},"channel_static":{},
          "basis_static":{}}})";
  EXPECT_THAT(
      Listed(Spec(), part, kFull),
      ElementsAre("q_proj.weight [32, 24]", "k_proj.weight [16, 24]",
                  "k_proj.basis.weight [12, 16]", "k_proj.basis.mean [16]",
                  "k_proj.range.min [12] F32", "k_proj.range.scale [12] F32",
                  "v_proj.weight [16, 24]", "o_proj.weight [24, 32]"));
}

TEST(PlanTensorsTest, ChannelsOfZeroBitsShortenALowRankLatent) {
  const auto part = [](const std::string& transform) {
    return absl::StrCat(
        R"({"low_rank":{"groups":[{"heads":[0,1],"rank":8}]},
            "stored":"PRE_ROPE","uses":[{"reconstruct":{}}],"codec":{"bits":
            {"schedule":[8,4,4,2,2,0,0,0]},"per_token":{},)",
        R"("param_dtype":"F16",")", transform, R"(":{}}})");
  };
  const auto fixed = Listed(Spec(), part("basis_static"), kFull);
  EXPECT_THAT(fixed, Contains("k_proj.down.weight [5, 24]"));
  EXPECT_THAT(fixed, Contains("k_proj.up.0.weight [16, 5]"));
  // A basis that is computed for each sequence needs all channels of
  // the latent.
  EXPECT_THAT(Listed(Spec(), part("basis_sequence"), kFull),
              Contains("k_proj.down.weight [8, 24]"));
}

TEST(PlanTensorsTest,
     TensorsThatRebuildAnchoredKeysHaveOnlyTheDimsOfTheirRopePairs) {
  const std::string slow =
      R"({"low_rank":{"groups":[{"heads":[0,1],"rank":3}]},
          "stored":"PRE_ROPE","uses":[{"pairs":[2,3],"anchored":
          {"block":16,"order":1}}],"codec":{"dtype":"BF16"}})";
  const std::string fast =
      R"({"rope_low_rank":{"groups":[{"heads":[0,1],"pairs":[0,1],
          "rank_per_pair":[1,1]}]},"stored":"POST_ROPE",
          "uses":[{"at_runtime":{}}],"codec":{"dtype":"BF16"}})";
  const auto tensors =
      Listed(WithBiases(), absl::StrCat(slow, ",", fast), kFull);
  EXPECT_THAT(tensors, Contains("k_proj.part0.up.0.weight [8, 3]"));
  EXPECT_THAT(tensors, Contains("k_proj.part0.up.bias [8]"));
  EXPECT_THAT(tensors, Contains("k_proj.part1.up.0.weight [2, 2, 2]"));
  EXPECT_THAT(tensors, Contains("q_proj.weight [32, 24]"));
}

TEST(PlanTensorsTest, DimsOfRopePairsDependOnHowPairsAreFormed) {
  const std::vector<uint32_t> pairs = {1, 2};
  EXPECT_THAT(PairDims({.rotary_dim = 6}, pairs), ElementsAre(1, 2, 4, 5));
  EXPECT_THAT(
      PairDims({.rotary_dim = 6, .pairing = RopePairing::kInterleaved}, pairs),
      ElementsAre(2, 3, 4, 5));
}

TEST(PlanTensorsTest, TheDimsThatAPartCoversAscendAndDependOnItsUses) {
  DecoderSpec spec = Spec();
  spec.rope.rotary_dim = 4;
  const auto covered = [&](plan::Side side, const std::string& part) {
    const LayerPlan layer = Layer(part, part);
    const auto attention =
        plan::ResolveAttention(layer, AttentionShapeOf(spec), 0);
    EXPECT_TRUE(attention.ok()) << attention.status();
    return attention->side(side).parts[0].dims;
  };
  const std::string head =
      R"({"low_rank":{"groups":[{"heads":[0,1],"rank":3}]},)";
  const std::string all = head + R"("stored":"PRE_ROPE","uses":[{"fold":{}}]})";
  EXPECT_THAT(covered(plan::Side::kKey, all),
              ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  const std::string rest = head + R"("stored":"NO_ROPE","uses":[{"fold":{}}]})";
  EXPECT_THAT(covered(plan::Side::kKey, rest), ElementsAre(4, 5, 6, 7));
  EXPECT_THAT(covered(plan::Side::kValue, rest),
              ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  const std::string two =
      head + R"("stored":"PRE_ROPE","uses":[{"reconstruct":{}},
                 {"pairs":[1],"anchored":{"block":4}}]})";
  EXPECT_THAT(covered(plan::Side::kKey, two), ElementsAre(1, 3, 4, 5, 6, 7));
}

TEST(PlanTensorsTest, APartThatTheArtifactFormatCannotStoreIsRefused) {
  EXPECT_THAT(DescribeAttention(
                  Spec(), Layer(LowRank("at_runtime", "POST_ROPE"), kFull)),
              StatusIs(absl::StatusCode::kUnimplemented,
                       HasSubstr("layer 0: "
                                 "self_attn.k_proj")));
}

TEST(PlanTensorsTest, JointKeysAndValuesShareAllTensorsExceptTheLifts) {
  const auto listed = [](const DecoderSpec& spec, const std::string& value,
                         const std::string& rest) {
    const LayerPlan apart = Layer(LowRank("reconstruct", "PRE_ROPE", rest),
                                  LowRank(value, "NO_ROPE"));
    LayerPlan layer;
    kvasir::v1::Part* const part = layer.add_joint();
    *part = apart.key().parts(0);
    *part->add_uses() = apart.value().parts(0).uses(0);
    part->mutable_uses(0)->set_serves(kvasir::v1::SERVES_KEY);
    part->mutable_uses(1)->set_serves(kvasir::v1::SERVES_VALUE);
    const auto attention = DescribeAttention(spec, layer);
    EXPECT_TRUE(attention.ok()) << attention.status();
    return attention.ok() ? Listed(*attention) : std::vector<std::string>();
  };
  EXPECT_THAT(
      listed(WithBiases(), "at_runtime",
             R"("latent_bias":true,"codec":{"bits":{"schedule":[4]},
                "channel_static":{}})"),
      ElementsAre("q_proj.weight [32, 24]", "q_proj.bias [32]",
                  "kv_proj.down.weight [5, 24]", "kv_proj.down.bias [5]",
                  "kv_proj.up_key.0.weight [8, 3]",
                  "kv_proj.up_key.1.weight [8, 2]", "kv_proj.up_key.bias [16]",
                  "kv_proj.range.min [5] F32", "kv_proj.range.scale [5] F32",
                  "kv_proj.up_value.0.weight [8, 3]",
                  "kv_proj.up_value.1.weight [8, 2]", "o_proj.weight [24, 32]",
                  "o_proj.bias [24]"));
  EXPECT_THAT(
      listed(Spec(), "fold", R"("codec":{"dtype":"BF16"})"),
      ElementsAre("q_proj.weight [32, 24]", "kv_proj.down.weight [5, 24]",
                  "kv_proj.up_key.0.weight [8, 3]",
                  "kv_proj.up_key.1.weight [8, 2]", "o_proj.weight [24, 10]"));
}

TEST(PlanTensorsTest, RefusesAPlanForAnotherModelWithoutACrash) {
  DecoderSpec spec = Spec();
  spec.num_kv_heads = 4;
  EXPECT_THAT(
      DescribeAttention(spec, Layer(LowRank("reconstruct", "PRE_ROPE"), kFull)),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("KV head 2 of 4 is in 0 groups")));
  EXPECT_THAT(
      RequiredTensors(spec, plan::ResolvedPlan()),
      StatusIs(
          absl::StatusCode::kInvalidArgument,
          HasSubstr("the plan's number of layers is 0, but the model's is 1")));
}

}  // namespace
}  // namespace kvasir::model
