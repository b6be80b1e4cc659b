// Applies plans that are written by hand, one for each space and lift. If a
// plan leaves nothing out, the applied layer must have the attention of the
// uncompressed layer. Otherwise its loss must be the one that theory predicts.
#include <cmath>
#include <limits>
#include <set>
#include <string>

#include "base/status_matchers.h"
#include "compress/methods/method.h"
#include "compress/methods/rope_factors.h"
#include "compress/methods/rope_pairs.h"
#include "compress/testing/tiny_attention.h"
#include "model/checkpoint/plan_tensors.h"
#include "plan/plan.h"

namespace kvasir::compress {
namespace {

using ::kvasir::base::StatusIs;
using kvasir::v1::KvPlan;
using kvasir::v1::Part;
using kvasir::v1::Stored;
using ::testing::HasSubstr;

constexpr double kTolerance = 1e-5;

enum class Lift { kFold, kAtRuntime, kReconstruct };

void SetLift(Part::Use* use, Lift lift) {
  if (lift == Lift::kFold) use->mutable_fold();
  if (lift == Lift::kAtRuntime) use->mutable_at_runtime();
  if (lift == Lift::kReconstruct) use->mutable_reconstruct();
}

Part FullPart(Stored stored) {
  Part part;
  part.mutable_full();
  part.set_stored(stored);
  part.mutable_codec()->set_dtype(kvasir::v1::F32);
  return part;
}

// Makes a low_rank part in which each group has `group_heads` consecutive
// heads.
Part LowRankPart(int64_t num_heads, int64_t group_heads, int64_t rank,
                 Stored stored, Lift lift) {
  Part part;
  for (int64_t begin = 0; begin < num_heads; begin += group_heads) {
    auto* group = part.mutable_low_rank()->add_groups();
    for (int64_t h = begin; h < begin + group_heads; ++h) {
      group->add_heads(static_cast<uint32_t>(h));
    }
    group->set_rank(static_cast<uint32_t>(rank));
  }
  part.set_stored(stored);
  SetLift(part.add_uses(), lift);
  part.mutable_codec()->set_dtype(kvasir::v1::F32);
  return part;
}

// Makes a rope_pairs part in which head h keeps the RoPE pairs
// pairs_of_head[h].
Part RopePairsPart(const std::vector<std::vector<uint32_t>>& pairs_of_head,
                   Lift lift) {
  Part part;
  for (const std::vector<uint32_t>& pairs : pairs_of_head) {
    auto* head = part.mutable_rope_pairs()->add_per_head();
    for (const uint32_t pair : pairs) head->add_pair_indices(pair);
  }
  part.set_stored(kvasir::v1::POST_ROPE);
  SetLift(part.add_uses(), lift);
  part.mutable_codec()->set_dtype(kvasir::v1::F32);
  return part;
}

// Makes a rope_low_rank part in which every group keeps ranks[f] complex
// channels of RoPE pair f.
Part RopeLowRankPart(int64_t num_heads, int64_t group_heads,
                     const std::vector<uint32_t>& ranks, bool bias, Lift lift) {
  Part part;
  for (int64_t begin = 0; begin < num_heads; begin += group_heads) {
    auto* group = part.mutable_rope_low_rank()->add_groups();
    for (int64_t h = begin; h < begin + group_heads; ++h) {
      group->add_heads(static_cast<uint32_t>(h));
    }
    for (uint32_t f = 0; f < ranks.size(); ++f) {
      if (ranks[f] == 0) continue;
      group->add_pairs(f);
      group->add_rank_per_pair(ranks[f]);
    }
  }
  part.set_stored(kvasir::v1::POST_ROPE);
  part.set_latent_bias(bias);
  SetLift(part.add_uses(), lift);
  part.mutable_codec()->set_dtype(kvasir::v1::F32);
  return part;
}

KvPlan OneLayer(const std::vector<Part>& keys, const Part& value) {
  KvPlan plan;
  plan.set_schema_version(plan::kPlanSchemaVersion);
  auto* layer = plan.add_layers();
  for (const Part& part : keys) *layer->mutable_key()->add_parts() = part;
  *layer->mutable_value()->add_parts() = value;
  return plan;
}

// Makes a plan of one layer with a joint part: each group of heads has one
// latent for keys and values.
KvPlan OneLayerOf(const Part& keys, Lift value_lift) {
  KvPlan plan;
  plan.set_schema_version(plan::kPlanSchemaVersion);
  Part* part = plan.add_layers()->add_joint();
  *part = keys;
  part->mutable_uses(0)->set_serves(kvasir::v1::SERVES_KEY);
  SetLift(part->add_uses(), value_lift);
  part->mutable_uses(1)->set_serves(kvasir::v1::SERVES_VALUE);
  return plan;
}

Part WholeValues() { return FullPart(kvasir::v1::NO_ROPE); }

// Replaces ANCHORED, which the reference decoder does not apply, by
// RECONSTRUCT, which gives the same keys from the same tensors.
KvPlan WithoutAnchors(KvPlan plan) {
  for (Part& part : *plan.mutable_layers(0)->mutable_key()->mutable_parts()) {
    for (Part::Use& use : *part.mutable_uses()) {
      if (use.has_anchored()) use.mutable_reconstruct();
    }
  }
  return plan;
}

// Applies a plan and computes attention with the resulting tensors. Checks that
// the plan is valid and that the tensors are those that the loader expects.
class Applied {
 public:
  Applied(const TinyLayers& tiny, const KvPlan& plan,
          Decomposition decomposition = Decomposition::kWhitened) {
    const model::DecoderSpec& spec = tiny.spec;
    KVASIR_EXPECT_OK(plan::ValidatePlan(
        plan, {.num_kv_heads = spec.num_kv_heads,
               .head_dim = spec.head_dim,
               .rotary_dim = spec.rope.rotary_dim,
               .layers = {{.rope = spec.rope.rotary_dim > 0}}}));
    ApplyRequest request = TinyApplyRequest(tiny, plan, 0);
    request.decomposition = decomposition;
    auto tensors = ApplyLayerPlan(request);
    KVASIR_EXPECT_OK(tensors);
    if (!tensors.ok()) return;
    tensors_ = *std::move(tensors);
    ExpectTensorsOfTheArtifact(spec, plan);
    attention_ = AttendCompressed(tiny, WithoutAnchors(plan), tensors_);
  }

  const at::Tensor& attention() const { return attention_; }
  const TensorMap& tensors() const { return tensors_; }

 private:
  void ExpectTensorsOfTheArtifact(const model::DecoderSpec& spec,
                                  const KvPlan& plan) {
    const plan::AttentionShape shape = model::AttentionShapeOf(spec);
    KVASIR_ASSERT_OK_AND_ASSIGN(
        const plan::ResolvedAttention attention,
        plan::ResolveAttention(plan.layers(0), shape, 0));
    auto want = plan::TensorsOf(attention, shape, 0);
    KVASIR_ASSERT_OK(want);
    std::set<std::string> names;
    for (const model::RequiredTensor& tensor : want->tensors) {
      const std::string& name = tensor.name;
      names.insert(name);
      ASSERT_TRUE(tensors_.count(name)) << name;
      EXPECT_EQ(tensors_.at(name).sizes().vec(), tensor.shape) << name;
      EXPECT_EQ(tensors_.at(name).scalar_type(), at::kFloat) << name;
    }
    for (const auto& [name, tensor] : tensors_) {
      EXPECT_TRUE(names.count(name))
          << name << " is not a tensor of the artifact";
    }
  }

  TensorMap tensors_;
  at::Tensor attention_;
};

struct ShapeCase {
  const char* name;
  TinyShape shape;
};
class ApplyTest : public ::testing::TestWithParam<ShapeCase> {
 protected:
  const TinyLayers tiny_ = MakeTinyLayers(GetParam().shape, 7);
  const TinyShape& shape_ = GetParam().shape;
  int64_t heads() const { return shape_.num_kv_heads; }
  int64_t dim() const { return shape_.head_dim; }
};
INSTANTIATE_TEST_SUITE_P(
    Shapes, ApplyTest,
    ::testing::Values(ShapeCase{"GroupedHalfSplit", {}},
                      ShapeCase{"MultiHeadInterleaved",
                                {.num_kv_heads = 4,
                                 .pairing = model::RopePairing::kInterleaved}},
                      ShapeCase{"GroupedBiased", {.qkv_bias = true}},
                      ShapeCase{"InterleavedBiased",
                                {.num_heads = 6,
                                 .num_kv_heads = 3,
                                 .pairing = model::RopePairing::kInterleaved,
                                 .qkv_bias = true}}),
    [](const auto& test) { return test.param.name; });

TEST_P(ApplyTest, APlanOfWholeKeysAndValuesGivesTheBaseModelsAttention) {
  const Applied applied(
      tiny_, OneLayer({FullPart(kvasir::v1::POST_ROPE)}, WholeValues()));
  EXPECT_LT(RelativeError(applied.attention(), AttendWhole(tiny_)), 1e-12);
}

TEST_P(ApplyTest, KeepingAllRopePairsGivesTheBaseModelsAttention) {
  const std::vector<std::vector<uint32_t>> all(static_cast<size_t>(heads()),
                                               {0, 1, 2, 3});
  for (const Lift lift : {Lift::kFold, Lift::kAtRuntime}) {
    const Applied applied(tiny_,
                          OneLayer({RopePairsPart(all, lift)}, WholeValues()));
    EXPECT_LT(RelativeError(applied.attention(), AttendWhole(tiny_)),
              kTolerance);
  }
}

TEST_P(ApplyTest, PruningRopePairsEqualsMaskingThem) {
  std::vector<std::vector<uint32_t>> kept;
  at::Tensor mask = at::zeros({heads(), dim()}, at::kDouble);
  for (int64_t head = 0; head < heads(); ++head) {
    kept.push_back(head % 2 == 0 ? std::vector<uint32_t>{0, 3}
                                 : std::vector<uint32_t>{1, 2});
    for (const uint32_t pair : kept.back()) {
      const PairDims dims = DimsOfPair(tiny_.spec.rope, pair);
      mask[head][dims.first] = 1.0;
      mask[head][dims.second] = 1.0;
    }
  }
  const at::Tensor masked = AttendWhole(tiny_, 0, mask);
  EXPECT_GT(RelativeError(masked, AttendWhole(tiny_)), 0.1);
  for (const Lift lift : {Lift::kFold, Lift::kAtRuntime}) {
    const Applied applied(tiny_,
                          OneLayer({RopePairsPart(kept, lift)}, WholeValues()));
    EXPECT_LT(RelativeError(applied.attention(), masked), kTolerance);
  }
}

TEST_P(ApplyTest, LatentsOfFullRankGiveTheBaseModelsAttentionInEverySpace) {
  const bool bias = shape_.qkv_bias;
  for (const int64_t group : {int64_t{1}, heads()}) {
    const auto terms = static_cast<uint32_t>(group);
    const Part values = LowRankPart(heads(), group, group * dim(),
                                    kvasir::v1::NO_ROPE, Lift::kAtRuntime);
    const std::vector<uint32_t> ranks(static_cast<size_t>(dim() / 2), terms);
    for (const Part& keys :
         {LowRankPart(heads(), group, group * dim(), kvasir::v1::PRE_ROPE,
                      Lift::kReconstruct),
          RopeLowRankPart(heads(), group, ranks, bias, Lift::kAtRuntime),
          RopeLowRankPart(heads(), group, ranks, bias, Lift::kFold)}) {
      for (const auto decomposition :
           {Decomposition::kWhitened, Decomposition::kSvd,
            Decomposition::kFisher}) {
        const Applied applied(tiny_, OneLayer({keys}, values), decomposition);
        EXPECT_LT(RelativeError(applied.attention(), AttendWhole(tiny_)),
                  kTolerance)
            << keys.ShortDebugString();
      }
    }
  }
}

// In this plan the channels of a RoPE pair are not adjacent, and the pairs are
// not sorted. This happens in plans that order channels by bits.
TEST_P(ApplyTest, ChannelsOfARopePairNeedNotBeAdjacent) {
  Part keys;
  auto* group = keys.mutable_rope_low_rank()->add_groups();
  for (int64_t head = 0; head < heads(); ++head) {
    group->add_heads(static_cast<uint32_t>(head));
    for (int64_t pair = dim() / 2 - 1; pair >= 0; --pair) {
      group->add_pairs(static_cast<uint32_t>(pair));
      group->add_rank_per_pair(1);
    }
  }
  keys.set_stored(kvasir::v1::POST_ROPE);
  keys.set_latent_bias(shape_.qkv_bias);
  keys.mutable_codec()->set_dtype(kvasir::v1::F32);
  Part::Use* use = keys.add_uses();
  for (const Lift lift : {Lift::kAtRuntime, Lift::kFold}) {
    SetLift(use, lift);
    for (const auto decomposition :
         {Decomposition::kWhitened, Decomposition::kFisher}) {
      const Applied applied(tiny_, OneLayer({keys}, WholeValues()),
                            decomposition);
      EXPECT_LT(RelativeError(applied.attention(), AttendWhole(tiny_)),
                kTolerance);
    }
  }
}

TEST_P(ApplyTest, AJointLatentOfFullRankGivesTheBaseModelsAttention) {
  for (const int64_t group : {int64_t{1}, heads()}) {
    // The full rank: the number of rows of keys and values, or of inputs if
    // these are fewer.
    const int64_t rank = std::min(2 * group * dim(), shape_.hidden_size);
    for (const Lift lift : {Lift::kAtRuntime, Lift::kFold}) {
      for (const bool mean : {false, true}) {
        Part keys = LowRankPart(heads(), group, rank, kvasir::v1::PRE_ROPE,
                                Lift::kReconstruct);
        keys.set_mean(mean);
        keys.set_latent_bias(mean && group == 1);
        for (const auto decomposition :
             {Decomposition::kWhitened, Decomposition::kSvd,
              Decomposition::kFisher}) {
          if (mean && decomposition == Decomposition::kFisher) continue;
          const Applied applied(tiny_, OneLayerOf(keys, lift), decomposition);
          EXPECT_LT(RelativeError(applied.attention(), AttendWhole(tiny_)),
                    kTolerance);
        }
      }
    }
  }
}

// Errors in keys and in values count equally here. Their total loss is the sum
// of the dropped squared singular values of one matrix, in which the rows of
// keys and values are stacked. It never exceeds the loss of two separate
// latents of half the rank.
TEST_P(ApplyTest,
       AJointLatentOfKeysAndValuesLosesNoMoreThanTwoSeparateLatents) {
  constexpr int64_t kRank = 10;
  const AttentionWeights& weights = tiny_.weights[0];
  const auto loss = [&](const at::Tensor& weight, const at::Tensor& bias,
                        const at::Tensor& up, const at::Tensor& up_bias,
                        const at::Tensor& down) {
    const at::Tensor want = tiny_.inputs.mm(weight.to(at::kDouble).t());
    at::Tensor have =
        tiny_.inputs.mm(down.to(at::kDouble).t()).mm(up.to(at::kDouble).t());
    if (bias.defined() && up_bias.defined()) {
      have = have + (up_bias - bias).to(at::kDouble);
    }
    return (have - want).square().sum().item<double>();
  };
  const auto get = [](const Applied& applied, const std::string& name) {
    const auto found = applied.tensors().find("self_attn." + name);
    return found == applied.tensors().end() ? at::Tensor() : found->second;
  };
  const auto plain = [&](int64_t rank) {
    return LowRankPart(heads(), heads(), rank, kvasir::v1::PRE_ROPE,
                       Lift::kReconstruct);
  };
  const Applied both(tiny_, OneLayerOf(plain(kRank), Lift::kAtRuntime));
  const at::Tensor down = get(both, "kv_proj.down.weight");
  const double together =
      loss(weights.key, weights.key_bias, get(both, "kv_proj.up_key.0.weight"),
           get(both, "kv_proj.up_key.bias"), down) +
      loss(weights.value, {}, get(both, "kv_proj.up_value.0.weight"), {}, down);
  Part values = LowRankPart(heads(), heads(), kRank / 2, kvasir::v1::NO_ROPE,
                            Lift::kAtRuntime);
  const Applied two(tiny_, OneLayer({plain(kRank / 2)}, values));
  const double apart =
      loss(weights.key, weights.key_bias, get(two, "k_proj.up.0.weight"),
           get(two, "k_proj.up.bias"), get(two, "k_proj.down.weight")) +
      loss(weights.value, {}, get(two, "v_proj.up.0.weight"), {},
           get(two, "v_proj.down.weight"));
  EXPECT_LT(together, apart);
  const at::Tensor rows =
      at::cat({weights.key, weights.value}, 0).to(at::kDouble);
  const at::Tensor gram =
      rows.mm(tiny_.inputs.t().mm(tiny_.inputs)).mm(rows.t());
  const at::Tensor energies = at::linalg_eigvalsh(gram);  // rising eigenvalues
  const double least =
      energies.slice(0, 0, energies.size(0) - kRank).sum().item<double>();
  EXPECT_NEAR(together, least, 1e-4 * least);
}

TEST_P(ApplyTest,
       FoldingALiftIntoTheWeightsGivesTheSameAttentionAsApplyingItAtRunTime) {
  std::vector<at::Tensor> results;
  for (const Lift lift : {Lift::kFold, Lift::kAtRuntime}) {
    const Applied applied(
        tiny_,
        OneLayer({RopeLowRankPart(heads(), heads(), {1, 0, 2, 1},
                                  shape_.qkv_bias, lift)},
                 LowRankPart(heads(), heads(), 5, kvasir::v1::NO_ROPE, lift)));
    results.push_back(applied.attention());
  }
  EXPECT_LT(RelativeError(results[0], results[1]), kTolerance);
  EXPECT_GT(RelativeError(results[0], AttendWhole(tiny_)), 1e-2);
}

TEST_P(ApplyTest, AFusedHadamardRotationDoesNotChangeTheAttention) {
  Part keys = LowRankPart(heads(), heads(), 8, kvasir::v1::PRE_ROPE,
                          Lift::kReconstruct);
  Part values = LowRankPart(heads(), 1, 4, kvasir::v1::NO_ROPE, Lift::kFold);
  const Applied plain(tiny_, OneLayer({keys}, values));
  keys.mutable_codec()->mutable_hadamard_fused();
  values.mutable_codec()->mutable_hadamard_fused();
  const Applied rotated(tiny_, OneLayer({keys}, values));
  EXPECT_LT(RelativeError(rotated.attention(), plain.attention()), kTolerance);
  EXPECT_GT(RelativeError(rotated.tensors().at("self_attn.k_proj.down.weight"),
                          plain.tensors().at("self_attn.k_proj.down.weight")),
            0.1);
}

TEST_P(ApplyTest, CentredLatentsOfFullRankGiveTheBaseModelsAttention) {
  for (const bool latent_bias : {false, true}) {
    Part keys = LowRankPart(heads(), heads(), heads() * dim(),
                            kvasir::v1::PRE_ROPE, Lift::kReconstruct);
    keys.set_mean(true);
    keys.set_latent_bias(latent_bias);
    Part values =
        LowRankPart(heads(), 1, dim(), kvasir::v1::NO_ROPE, Lift::kFold);
    values.set_mean(true);
    values.set_latent_bias(latent_bias);
    const Applied applied(tiny_, OneLayer({keys}, values));
    EXPECT_LT(RelativeError(applied.attention(), AttendWhole(tiny_)),
              kTolerance);
  }
}

TEST_P(ApplyTest, ChannelsWithZeroBitsAreNotStored) {
  const Part short_keys = LowRankPart(heads(), heads(), 4, kvasir::v1::PRE_ROPE,
                                      Lift::kReconstruct);
  Part keys = LowRankPart(heads(), heads(), 8, kvasir::v1::PRE_ROPE,
                          Lift::kReconstruct);
  for (const uint32_t bits : {8, 8, 4, 4, 0, 0, 0, 0}) {
    keys.mutable_codec()->mutable_bits()->add_schedule(bits);
  }
  keys.mutable_codec()->mutable_per_token();
  keys.mutable_codec()->set_param_dtype(kvasir::v1::F16);
  const Applied truncated(tiny_, OneLayer({keys}, WholeValues()));
  const Applied shorter(tiny_, OneLayer({short_keys}, WholeValues()));
  EXPECT_LT(RelativeError(truncated.attention(), shorter.attention()),
            kTolerance);
}

TEST_P(ApplyTest, AllChannelsAreStoredIfEachSequenceHasItsOwnBasis) {
  Part keys = LowRankPart(heads(), heads(), 8, kvasir::v1::PRE_ROPE,
                          Lift::kReconstruct);
  const KvPlan numbers = OneLayer({keys}, WholeValues());
  for (const uint32_t bits : {8, 8, 4, 4, 0, 0, 0, 0}) {
    keys.mutable_codec()->mutable_bits()->add_schedule(bits);
  }
  keys.mutable_codec()->mutable_channel_sequence();
  keys.mutable_codec()->set_param_dtype(kvasir::v1::F16);
  keys.mutable_codec()->mutable_basis_sequence()->set_min_tokens(16);
  const KvPlan codes = OneLayer({keys}, WholeValues());
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const auto want,
      plan::ResolveAttention(codes.layers(0),
                             model::AttentionShapeOf(tiny_.spec), 0));
  EXPECT_EQ(want.key.parts[0].latents[0].channels, 8);
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const TensorMap plain,
      ApplyLayerPlan(TinyApplyRequest(tiny_, numbers, 0)));
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const TensorMap coded, ApplyLayerPlan(TinyApplyRequest(tiny_, codes, 0)));
  const std::string down = "self_attn.k_proj.down.weight";
  ASSERT_EQ(coded.at(down).size(0), 8);
  EXPECT_EQ(RelativeError(coded.at(down), plain.at(down)), 0.0);
}

TEST_P(ApplyTest, TheSvdTheWhitenedSvdAndEspaceGiveTheSamePrincipalBasis) {
  Part keys = LowRankPart(heads(), heads(), 8, kvasir::v1::PRE_ROPE,
                          Lift::kReconstruct);
  keys.mutable_codec()->mutable_basis_static();
  const KvPlan plan = OneLayer({keys}, WholeValues());
  const Applied whitened(tiny_, plan);
  for (const auto decomposition :
       {Decomposition::kSvd, Decomposition::kEspace}) {
    const Applied other(tiny_, plan, decomposition);
    EXPECT_LT(RelativeError(other.attention(), whitened.attention()),
              kTolerance);
  }
}

TEST_P(ApplyTest,
       ABasisOfFullRankBeforeOrAfterTheRotationGivesTheBaseModelsAttention) {
  for (const Stored stored : {kvasir::v1::PRE_ROPE, kvasir::v1::POST_ROPE}) {
    Part keys = FullPart(stored);
    keys.set_mean(true);
    keys.mutable_codec()->mutable_basis_static();
    Part values = WholeValues();
    values.mutable_codec()->mutable_basis_static();
    const Applied applied(tiny_, OneLayer({keys}, values));
    EXPECT_LT(RelativeError(applied.attention(), AttendWhole(tiny_)),
              kTolerance);
    const at::Tensor basis =
        applied.tensors().at("self_attn.k_proj.basis.weight");
    EXPECT_LT(RelativeError(basis.mm(basis.t()), at::eye(basis.size(0))),
              kTolerance);
  }
}

TEST_P(ApplyTest, ATruncatedBasisDropsTheChannelsWithTheLeastVariance) {
  Part keys = FullPart(kvasir::v1::POST_ROPE);
  keys.set_mean(true);
  keys.mutable_codec()->mutable_basis_static();
  for (const uint32_t bits : {8, 8, 8, 8, 8, 8, 8, 0}) {
    keys.mutable_codec()->mutable_bits()->add_schedule(bits);
  }
  keys.mutable_codec()->mutable_channel_static();
  KvPlan plan = OneLayer({keys}, WholeValues());
  ApplyRequest request = TinyApplyRequest(tiny_, plan, 0);
  KVASIR_ASSERT_OK_AND_ASSIGN(const TensorMap tensors, ApplyLayerPlan(request));
  const at::Tensor basis =
      tensors.at("self_attn.k_proj.basis.weight").to(at::kDouble);
  const LayerCalibration& layer = tiny_.calibration.layers[0];
  const auto tokens = static_cast<double>(tiny_.calibration.num_tokens);
  const at::Tensor covariance =
      layer.rotated_key_gram -
      at::outer(layer.rotated_key_sum, layer.rotated_key_sum) / tokens;
  const at::Tensor values = at::linalg_eigvalsh(covariance);
  const int64_t dropped = heads() * dim() / 8;
  EXPECT_EQ(basis.size(0), heads() * dim() - dropped);
  const double left =
      (covariance.trace() - basis.mm(covariance).mm(basis.t()).trace())
          .item<double>();
  const double least = values.narrow(0, 0, dropped).sum().item<double>();
  EXPECT_NEAR(left / least, 1.0, 1e-4);
}

TEST_P(ApplyTest, RopePairsThatShareALatentMayBeLiftedInDifferentWays) {
  Part keys = LowRankPart(heads(), heads(), heads() * dim(),
                          kvasir::v1::PRE_ROPE, Lift::kReconstruct);
  keys.clear_uses();
  Part::Use* fast = keys.add_uses();
  fast->mutable_reconstruct();
  fast->add_pairs(0);
  Part::Use* slow = keys.add_uses();
  slow->mutable_anchored()->set_block(16);
  slow->mutable_anchored()->set_order(1);
  for (const uint32_t pair : {1, 2, 3}) slow->add_pairs(pair);
  const Applied applied(tiny_, OneLayer({keys}, WholeValues()));
  EXPECT_LT(RelativeError(applied.attention(), AttendWhole(tiny_)), kTolerance);
}

// --------------------------------------------- losses of commuting latents

// Returns the keys of all KV heads at one RoPE pair as complex numbers, [N,
// Hkv].
at::Tensor ComplexKeys(const TinyLayers& tiny, int64_t pair) {
  at::Tensor keys = tiny.inputs.mm(tiny.weights[0].key.to(at::kDouble).t());
  if (tiny.weights[0].key_bias.defined()) {
    keys = keys + tiny.weights[0].key_bias.to(at::kDouble);
  }
  const PairDims dims = DimsOfPair(tiny.spec.rope, pair);
  const at::Tensor heads =
      keys.view({-1, tiny.spec.num_kv_heads, tiny.spec.head_dim});
  return at::complex(heads.select(2, dims.first).contiguous(),
                     heads.select(2, dims.second).contiguous());
}

// The latents and the lift of a rope_low_rank part over all heads, as complex
// numbers.
class CommutingKeys {
 public:
  CommutingKeys(const TinyLayers& tiny, const std::vector<uint32_t>& ranks)
      : applied_(tiny,
                 OneLayer({RopeLowRankPart(
                              tiny.spec.num_kv_heads, tiny.spec.num_kv_heads,
                              ranks, tiny.spec.qkv_bias, Lift::kAtRuntime)},
                          WholeValues())) {
    at::Tensor latent = tiny.inputs.mm(Get("down.weight").t());
    if (tiny.spec.qkv_bias) latent = latent + Get("down.bias");
    const int64_t channels = latent.size(1) / 2;
    latents_ = at::complex(latent.narrow(1, 0, channels).contiguous(),
                           latent.narrow(1, channels, channels).contiguous());
    const at::Tensor up = Get("up.0.weight");
    lift_ =
        at::complex(up.select(1, 0).contiguous(), up.select(1, 1).contiguous());
    weights_ = QueryWeights(tiny.spec, tiny.calibration.layers[0].query_energy,
                            CommutingWeights().query_floor);
  }

  const at::Tensor& latents() const { return latents_; }  // [N, C]
  const at::Tensor& lift() const { return lift_; }        // [Hkv, C]
  // Returns the weights of the heads at a RoPE pair, [Hkv].
  at::Tensor weights(int64_t pair) const { return weights_.select(1, pair); }

 private:
  at::Tensor Get(const std::string& name) const {
    return applied_.tensors().at("self_attn.k_proj." + name).to(at::kDouble);
  }

  Applied applied_;
  at::Tensor latents_;
  at::Tensor lift_;
  at::Tensor weights_;
};

const std::vector<uint32_t> kRanks = {1, 2, 1, 1};

TEST_P(ApplyTest,
       TheErrorOfATruncatedCommutingLatentFollowsFromTheDroppedSingularValues) {
  const CommutingKeys commuting(tiny_, kRanks);
  int64_t begin = 0;
  for (int64_t pair = 0; pair < 4; ++pair) {
    const int64_t rank = kRanks[static_cast<size_t>(pair)];
    const at::Tensor w = commuting.weights(pair);
    const at::Tensor want = ComplexKeys(tiny_, pair) * w;
    const at::Tensor have =
        commuting.latents()
            .narrow(1, begin, rank)
            .mm(commuting.lift().narrow(1, begin, rank).t()) *
        w;
    const double error = (want - have).norm().item<double>();
    // The matrix `want` of weighted keys has the same singular values as the
    // matrix that is factored (rope_factors.h).
    const at::Tensor singular = at::linalg_svdvals(want.t().contiguous());
    const double dropped = singular.narrow(0, rank, singular.size(0) - rank)
                               .square()
                               .sum()
                               .sqrt()
                               .item<double>();
    if (rank == heads()) {
      EXPECT_LT(error / want.norm().item<double>(), kTolerance);
    } else {
      EXPECT_NEAR(error / dropped, 1.0, kTolerance);
    }
    begin += rank;
  }
}

TEST_P(ApplyTest, RopeLowRankLatentsCommuteWithTheRotation) {
  const CommutingKeys commuting(tiny_, kRanks);
  int64_t begin = 0;
  for (int64_t pair = 0; pair < 4; ++pair) {
    const int64_t rank = kRanks[static_cast<size_t>(pair)];
    const at::Tensor angle =
        at::arange(tiny_.inputs.size(0), at::kDouble).unsqueeze(1) *
        tiny_.spec.rope.frequencies[static_cast<size_t>(pair)];
    // Rotates the pair in each head with RoPE's formulas for real numbers, then
    // projects the heads to latents. The lift is diag(1 / w) U and the
    // projection is UH diag(w), so `project` is the lift with the row of each
    // head multiplied by w squared.
    const at::Tensor keys = ComplexKeys(tiny_, pair);
    const at::Tensor a = at::real(keys);
    const at::Tensor b = at::imag(keys);
    const at::Tensor turned = at::complex(a * angle.cos() - b * angle.sin(),
                                          b * angle.cos() + a * angle.sin());
    const at::Tensor w = commuting.weights(pair).unsqueeze(1);
    const at::Tensor project =
        commuting.lift().narrow(1, begin, rank) * w.square();
    const at::Tensor after = turned.mm(project.conj());
    const at::Tensor before = commuting.latents().narrow(1, begin, rank) *
                              at::complex(angle.cos(), angle.sin());
    EXPECT_LT(RelativeError(at::real(after), at::real(before)), kTolerance);
    EXPECT_LT(RelativeError(at::imag(after), at::imag(before)), kTolerance);
    begin += rank;
  }
}

// --------------------------------------------------- dims without a rotation

TEST(ApplyPartialRotaryTest,
     KeepingAllRopePairsAndAllUnrotatedDimsGivesTheBaseModelsAttention) {
  for (const bool bias : {false, true}) {
    const TinyLayers tiny =
        MakeTinyLayers({.rotary_dim = 4, .qkv_bias = bias}, 11);
    const std::vector<std::vector<uint32_t>> all = {{0, 1}, {0, 1}};
    for (const Lift pairs_lift : {Lift::kFold, Lift::kAtRuntime}) {
      for (const Lift rest_lift : {Lift::kFold, Lift::kAtRuntime}) {
        const Applied applied(
            tiny,
            OneLayer({RopePairsPart(all, pairs_lift),
                      LowRankPart(2, 1, 4, kvasir::v1::NO_ROPE, rest_lift)},
                     WholeValues()));
        // No bias is needed for absorbed keys: it would change all scores of a
        // query by the same amount, which the softmax ignores.
        EXPECT_LT(RelativeError(applied.attention(), AttendWhole(tiny)),
                  kTolerance);
      }
    }
    const Applied commuting(
        tiny, OneLayer({RopeLowRankPart(2, 2, {2, 2}, bias, Lift::kAtRuntime),
                        LowRankPart(2, 2, 8, kvasir::v1::NO_ROPE, Lift::kFold)},
                       WholeValues()));
    EXPECT_LT(RelativeError(commuting.attention(), AttendWhole(tiny)),
              kTolerance);
  }
}

TEST(ApplyNoRopeTest, AbsorbedLowRankKeysOfFullRankGiveTheBaseModelsAttention) {
  for (const bool bias : {false, true}) {
    const TinyLayers tiny =
        MakeTinyLayers({.rotary_dim = 0, .qkv_bias = bias}, 13);
    for (const Lift lift :
         {Lift::kFold, Lift::kAtRuntime, Lift::kReconstruct}) {
      const Applied applied(
          tiny,
          OneLayer({LowRankPart(2, 1, 8, kvasir::v1::NO_ROPE, lift)},
                   LowRankPart(2, 2, 16, kvasir::v1::NO_ROPE, Lift::kFold)));
      EXPECT_LT(RelativeError(applied.attention(), AttendWhole(tiny)),
                kTolerance);
    }
  }
}

// -------------------------------------------------------------------- refusals

class ApplyRefusalTest : public ::testing::Test {
 protected:
  absl::Status Apply(const KvPlan& plan) {
    ApplyRequest request = TinyApplyRequest(tiny_, plan, 0);
    request.layer = 3;
    if (!calibrated_) request.calibration = nullptr;
    request.spec = &tiny_.spec;
    tiny_.spec.layers.resize(4);
    return ApplyLayerPlan(request).status();
  }

  TinyLayers tiny_ = MakeTinyLayers({.qkv_bias = true}, 5);
  bool calibrated_ = true;
  const KvPlan full_ =
      OneLayer({FullPart(kvasir::v1::POST_ROPE)}, WholeValues());
};

TEST_F(ApplyRefusalTest, WeightsThatAreNotFiniteAreNamedInTheError) {
  tiny_.weights[0].key[1][2] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THAT(Apply(full_),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("layer 3: k_proj.weight holds a number")));
}

TEST_F(ApplyRefusalTest, WeightsOfAWrongShapeAreNamedInTheError) {
  tiny_.weights[0].output = at::zeros({40, 31});
  EXPECT_THAT(Apply(full_),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("layer 3: o_proj.weight must have the shape "
                                 "[40, 32], has [40, 31]")));
  tiny_.weights[0].output = at::zeros({40, 32});
  tiny_.weights[0].query_bias = at::Tensor();
  EXPECT_THAT(Apply(full_), StatusIs(absl::StatusCode::kInvalidArgument,
                                     HasSubstr("q_proj.bias is missing")));
}

TEST_F(ApplyRefusalTest, APlanThatNeedsACalibrationIsRefusedWithoutOne) {
  calibrated_ = false;
  KVASIR_EXPECT_OK(Apply(full_));
  const auto needs_one = StatusIs(absl::StatusCode::kFailedPrecondition,
                                  HasSubstr("layer 3 key part 0"));
  EXPECT_THAT(Apply(OneLayer(
                  {RopeLowRankPart(2, 2, {1, 1, 1, 1}, true, Lift::kAtRuntime)},
                  WholeValues())),
              needs_one);
  EXPECT_THAT(Apply(OneLayer({LowRankPart(2, 2, 4, kvasir::v1::PRE_ROPE,
                                          Lift::kReconstruct)},
                             WholeValues())),
              needs_one);
  Part basis = FullPart(kvasir::v1::PRE_ROPE);
  basis.mutable_codec()->mutable_basis_static();
  EXPECT_THAT(Apply(OneLayer({basis}, WholeValues())), needs_one);
}

TEST_F(ApplyRefusalTest, ABasisForRotatedKeysNeedsTheGramMatrixOfRotatedKeys) {
  tiny_.calibration.layers[0].rotated_key_gram = at::Tensor();
  Part basis = FullPart(kvasir::v1::POST_ROPE);
  basis.mutable_codec()->mutable_basis_static();
  EXPECT_THAT(Apply(OneLayer({basis}, WholeValues())),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("Gram matrix of rotated keys")));
}

TEST_F(ApplyRefusalTest, CommutingKeysOfAModelWithKeyBiasNeedALatentBias) {
  EXPECT_THAT(Apply(OneLayer({RopeLowRankPart(2, 2, {1, 1, 1, 1}, false,
                                              Lift::kAtRuntime)},
                             WholeValues())),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("must set latent_bias")));
}

TEST_F(ApplyRefusalTest, AnInvalidQueryEnergyOrQueryFloorIsNamedInTheError) {
  const auto refused = [](const char* text) {
    return StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text));
  };
  KvPlan plan =
      OneLayer({RopeLowRankPart(2, 2, {1, 1, 1, 1}, true, Lift::kAtRuntime)},
               WholeValues());
  auto* commuting = plan.mutable_provenance()->mutable_commuting();
  commuting->set_query_energy(true);
  EXPECT_THAT(Apply(plan), refused("finite and above 0, is 0"));
  commuting->set_query_floor(1e-3);
  KVASIR_EXPECT_OK(Apply(plan));
  at::Tensor& energy = tiny_.calibration.layers[0].query_energy;
  energy[1][2] = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(Apply(plan), refused("layer 3 key part 0: the calibration's "
                                   "query_energy holds a number"));
  energy = at::ones({2, 8}, at::kDouble);
  EXPECT_THAT(Apply(plan), refused("must have the shape [4, 8], has [2, 8]"));
  energy = at::Tensor();
  EXPECT_THAT(Apply(plan), refused("has none"));
  commuting->set_query_energy(false);
  KVASIR_EXPECT_OK(Apply(plan));
}

TEST_F(ApplyRefusalTest, ARankLargerThanTheMatrixIsNamedInTheError) {
  EXPECT_THAT(Apply(OneLayer({LowRankPart(2, 2, 17, kvasir::v1::PRE_ROPE,
                                          Lift::kReconstruct)},
                             WholeValues())),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("layer 3 key part 0: rank must be 1..16")));
}

}  // namespace
}  // namespace kvasir::compress
