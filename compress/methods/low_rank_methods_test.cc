// From planner to outputs: what the low-rank planners plan, the applier makes
// and the reference layer computes, against the uncompressed layer.
#include <ATen/Parallel.h>

#include <string>
#include <utility>
#include <vector>

#include "base/status_matchers.h"
#include "compress/methods/lorc.h"
#include "compress/methods/palu.h"
#include "compress/methods/svdq.h"
#include "compress/oracle/layer_forward.h"
#include "compress/testing/planner_fixture.h"

namespace kvasir::compress {
namespace {

using ::kvasir::v1::Codec;
using ::kvasir::v1::KvPlan;
using ::kvasir::v1::LayerPlan;
using ::kvasir::v1::Part;

constexpr int64_t kTokens = 150;
constexpr char kValueDown[] = "self_attn.v_proj.down.weight";
// float32 all the way.
constexpr double kTolerance = 1e-4;

struct Case {
  const char* name;
  TinyModel model;
  bool second_layer_rotates = true;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class KeyCollector : public LayerObserver {
 public:
  void OnRotatedKey(int64_t, const at::Tensor& key) override {
    keys_ = key.flatten(0, 1).flatten(1, 2).to(at::kDouble);  // [T, Hkv * D]
  }
  const at::Tensor& keys() const { return keys_; }

 private:
  at::Tensor keys_;
};

double RelativeError(const at::Tensor& have, const at::Tensor& want) {
  return ((have - want).norm() / want.norm()).item<double>();
}

// Two layers of random weights over inputs about a mean.
class LowRankMethodsTest : public ::testing::TestWithParam<Case> {
 protected:
  PlanRequest request_;
  std::vector<AttentionWeights> weights_;
  Calibration calibration_;
  at::Tensor x_;  // [1, T, M]
  Rotation rotation_;
  std::vector<at::Tensor> wanted_;  // of the uncompressed layers

  void SetUp() override {
    at::set_num_threads(1);  // the tensors are tiny
    TinyModel model = GetParam().model;
    model.layers = 2;
    request_ = RequestOf(model);
    request_.key_codec = NumberCodec(kvasir::v1::F32);
    request_.value_codec = NumberCodec(kvasir::v1::F32);
    request_.spec.layers[1].rope = GetParam().second_layer_rotates;
    request_.rank_multiple = 4;
    request_.weights = [this](int64_t layer) {
      return absl::StatusOr<AttentionWeights>(
          weights_[static_cast<size_t>(layer)]);
    };
    x_ = RandomMatrix({1, kTokens, model.hidden}, 1) *
             at::linspace(2, 0.1, model.hidden) +
         0.5;
    rotation_ = MakeRotation(request_.spec.rope, kTokens, at::kFloat);
    calibration_ = FisherCalibration(request_.spec, 4);
    calibration_.num_tokens = kTokens;
    request_.calibration = &calibration_;
    for (uint64_t layer = 0; layer < 2; ++layer) AddLayer(layer);
  }

  void AddLayer(uint64_t layer) {
    const model::DecoderSpec& spec = request_.spec;
    const int64_t inputs = spec.hidden_size;
    const int64_t kv = spec.num_kv_heads * spec.head_dim;
    const int64_t q = spec.num_heads * spec.head_dim;
    const uint64_t seed = 10 * (layer + 1);
    AttentionWeights weights{
        .query = 0.1 * RandomMatrix({q, inputs}, seed),
        .key = 0.1 * RandomMatrix({kv, inputs}, seed + 1),
        .value = 0.1 * RandomMatrix({kv, inputs}, seed + 2),
        .output = 0.1 * RandomMatrix({inputs, q}, seed + 3)};
    TensorMap tensors = {{"self_attn.q_proj.weight", weights.query},
                         {"self_attn.k_proj.weight", weights.key},
                         {"self_attn.v_proj.weight", weights.value},
                         {"self_attn.o_proj.weight", weights.output}};
    if (spec.qkv_bias) {
      weights.query_bias = RandomMatrix({q}, seed + 4);
      weights.key_bias = RandomMatrix({kv}, seed + 5);
      weights.value_bias = RandomMatrix({kv}, seed + 6);
      tensors["self_attn.q_proj.bias"] = weights.query_bias;
      tensors["self_attn.k_proj.bias"] = weights.key_bias;
      tensors["self_attn.v_proj.bias"] = weights.value_bias;
    }
    weights_.push_back(weights);
    KeyCollector collector;
    wanted_.push_back(Forward(nullptr, static_cast<int64_t>(layer), tensors,
                              {.observer = &collector}));
    const at::Tensor flat = x_[0].to(at::kDouble);
    LayerCalibration& moments = calibration_.layers[layer];
    moments.input_gram = at::matmul(flat.t(), flat);
    moments.input_sum = flat.sum(0);
    moments.rotated_key_gram =
        at::matmul(collector.keys().t(), collector.keys());
    moments.rotated_key_sum = collector.keys().sum(0);
  }

  at::Tensor Forward(const LayerPlan* plan, int64_t layer,
                     const TensorMap& tensors, const LayerHooks& hooks) {
    const auto program = MakeLayerProgram(request_.spec, plan, layer);
    KVASIR_EXPECT_OK(program);
    if (!program.ok()) return {};
    const auto output =
        AttentionForward(*program, tensors, rotation_, x_, hooks);
    KVASIR_EXPECT_OK(output);
    return output.ok() ? *output : at::Tensor{};
  }

  TensorMap Tensors(const KvPlan& plan, int64_t layer) {
    const auto l = static_cast<size_t>(layer);
    const auto tensors =
        ApplyLayerPlan({.spec = &request_.spec,
                        .plan = &plan.layers(static_cast<int>(layer)),
                        .layer = layer,
                        .weights = weights_[l],
                        .calibration = &calibration_.layers[l],
                        .num_tokens = kTokens});
    KVASIR_EXPECT_OK(tensors);
    return tensors.ok() ? *tensors : TensorMap{};
  }

  // What the plan's layer computes with numbers that are stored as they are.
  at::Tensor Compressed(const KvPlan& plan, int64_t layer,
                        Decomposition decomposition,
                        bool split_singular_values = false) {
    const LayerPlan& layer_plan = plan.layers(static_cast<int>(layer));
    const auto l = static_cast<size_t>(layer);
    const auto tensors =
        ApplyLayerPlan({.spec = &request_.spec,
                        .plan = &layer_plan,
                        .layer = layer,
                        .weights = weights_[l],
                        .calibration = &calibration_.layers[l],
                        .num_tokens = kTokens,
                        .decomposition = decomposition,
                        .split_singular_values = split_singular_values});
    KVASIR_EXPECT_OK(tensors);
    if (!tensors.ok()) return at::zeros_like(wanted_[l]);
    return Forward(&layer_plan, layer, *tensors, {.code_latents = false});
  }

  void ExpectTheUncompressedModel(const KvPlan& plan,
                                  Decomposition decomposition) {
    for (int64_t layer = 0; layer < 2; ++layer) {
      EXPECT_LT(RelativeError(Compressed(plan, layer, decomposition),
                              wanted_[static_cast<size_t>(layer)]),
                kTolerance)
          << "layer " << layer << " of " << plan.provenance().options();
    }
  }
};

INSTANTIATE_TEST_SUITE_P(
    Shapes, LowRankMethodsTest,
    ::testing::Values(Case{"Grouped", {}}, Case{"MultiHead", {.heads = 4}},
                      Case{"BiasedInterleaved",
                           {.bias = true,
                            .pairing = model::RopePairing::kInterleaved}},
                      Case{"PartlyRotary", {.rotary_dim = 8, .bias = true}},
                      Case{"ALayerWithoutPositions", {.bias = true}, false}),
    [](const auto& test) { return test.param.name; });

TEST_P(LowRankMethodsTest, PaluThatKeepsAllIsTheUncompressedModel) {
  request_.keep = 1;
  for (const int64_t group_heads : {1, 2, 0}) {
    for (const Decomposition decomposition :
         {Decomposition::kSvd, Decomposition::kWhitened}) {
      for (const bool hadamard : {false, true}) {
        // Codes, which are left out here, keep the latents of full rank.
        request_.key_codec = request_.value_codec =
            hadamard ? NumberCodec(kvasir::v1::F32) : BitsCodec(8);
        KVASIR_ASSERT_OK_AND_ASSIGN(
            const KvPlan plan,
            PlanPalu(request_, {.group_heads = group_heads,
                                .decomposition = decomposition,
                                .hadamard = hadamard}));
        EXPECT_TRUE(plan.layers(0).key().parts(0).has_low_rank());
        ExpectTheUncompressedModel(plan, decomposition);
      }
    }
  }
}

TEST_P(LowRankMethodsTest, LorcThatKeepsAllIsTheUncompressedModel) {
  request_.keep = 1;
  for (const Codec& codec : {NumberCodec(kvasir::v1::F32), BitsCodec(8)}) {
    request_.key_codec = request_.value_codec = codec;
    KVASIR_ASSERT_OK_AND_ASSIGN(const KvPlan plan, PlanLorc(request_, {}));
    EXPECT_EQ(plan.layers(0).key().parts(0).has_full(), codec.has_dtype());
    ExpectTheUncompressedModel(plan, Decomposition::kSvd);
  }
}

TEST_P(LowRankMethodsTest, SvdqWithoutCodesIsTheUncompressedModel) {
  for (const bool post_rope : {false, true}) {
    KVASIR_ASSERT_OK_AND_ASSIGN(
        const KvPlan plan,
        PlanSvdq(request_, {.schedule = {8, 8, 4, 4, 2, 2, 1, 1},
                            .post_rope = post_rope}));
    ExpectTheUncompressedModel(plan, Decomposition::kWhitened);
  }
}

TEST_P(LowRankMethodsTest, ChannelCodesWithoutCodesAreTheUncompressedModel) {
  for (const bool post_rope : {false, true}) {
    KVASIR_ASSERT_OK_AND_ASSIGN(
        const KvPlan plan,
        PlanChannelCodes(request_, {.post_rope = post_rope, .value_bits = 4}));
    ExpectTheUncompressedModel(plan, Decomposition::kWhitened);
  }
}

TEST_P(LowRankMethodsTest, HadamardChangesNothingWithoutCodes) {
  for (const int64_t group_heads : {1, 0}) {
    PaluOptions options{.group_heads = group_heads,
                        .search = RankSearch::kUniform};
    KVASIR_ASSERT_OK_AND_ASSIGN(const KvPlan plain,
                                PlanPalu(request_, options));
    options.hadamard = true;
    KVASIR_ASSERT_OK_AND_ASSIGN(const KvPlan rotated,
                                PlanPalu(request_, options));
    for (int64_t layer = 0; layer < 2; ++layer) {
      EXPECT_LT(
          RelativeError(Compressed(rotated, layer, Decomposition::kWhitened),
                        Compressed(plain, layer, Decomposition::kWhitened)),
          kTolerance);
      // But the latents are others.
      const at::Tensor down = Tensors(rotated, layer).at(kValueDown);
      EXPECT_GT(RelativeError(down, Tensors(plain, layer).at(kValueDown)), 0.1);
    }
  }
}

TEST_P(LowRankMethodsTest, WhoCarriesTheSingularValuesChangesNothing) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const KvPlan plan,
                              PlanPalu(request_, {.group_heads = 2}));
  for (int64_t layer = 0; layer < 2; ++layer) {
    EXPECT_LT(
        RelativeError(Compressed(plan, layer, Decomposition::kWhitened, true),
                      Compressed(plan, layer, Decomposition::kWhitened)),
        kTolerance);
  }
}

// Gives every absorbed use of a side the other lift.
void SwapLifts(kvasir::v1::SidePlan* side) {
  for (Part& part : *side->mutable_parts()) {
    for (Part::Use& use : *part.mutable_uses()) {
      if (use.has_fold()) {
        use.mutable_at_runtime();
      } else if (use.has_at_runtime()) {
        use.mutable_fold();
      }
    }
  }
}

TEST_P(LowRankMethodsTest, FoldAndAtRuntimeAgree) {
  for (const int64_t group_heads : {1, 0}) {
    KVASIR_ASSERT_OK_AND_ASSIGN(
        const KvPlan plan, PlanPalu(request_, {.group_heads = group_heads}));
    KvPlan swapped = plan;
    for (LayerPlan& layer : *swapped.mutable_layers()) {
      SwapLifts(layer.mutable_key());
      SwapLifts(layer.mutable_value());
    }
    for (int64_t layer = 0; layer < 2; ++layer) {
      EXPECT_LT(
          RelativeError(Compressed(swapped, layer, Decomposition::kWhitened),
                        Compressed(plan, layer, Decomposition::kWhitened)),
          kTolerance);
    }
  }
}

TEST_P(LowRankMethodsTest, EveryDecompositionAppliesAtHalf) {
  for (const Decomposition decomposition :
       {Decomposition::kSvd, Decomposition::kWhitened,
        Decomposition::kEspace}) {
    KVASIR_ASSERT_OK_AND_ASSIGN(
        const KvPlan plan,
        PlanPalu(request_, {.group_heads = 2, .decomposition = decomposition}));
    for (int64_t layer = 0; layer < 2; ++layer) {
      const double error = RelativeError(Compressed(plan, layer, decomposition),
                                         wanted_[static_cast<size_t>(layer)]);
      EXPECT_GT(error, kTolerance);  // half is not all
      EXPECT_LT(error, 1.0);
    }
  }
}

}  // namespace
}  // namespace kvasir::compress
