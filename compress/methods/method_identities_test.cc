// Tests every method from checkpoint to logits: calibrate, plan, apply, and run
// the result in the reference decoder. A plan that keeps everything must give
// the logits of the uncompressed model, the teacher.
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "compress/calibrate/calibrate.h"
#include "compress/methods/commuting.h"
#include "compress/methods/lorc.h"
#include "compress/methods/palu.h"
#include "compress/methods/rap.h"
#include "compress/methods/rope_pairs.h"
#include "compress/methods/svdq.h"
#include "compress/oracle/reference_decoder.h"
#include "gmock/gmock.h"

namespace kvasir::compress {
namespace {

using kvasir::v1::Codec;
using kvasir::v1::KvPlan;
using kvasir::v1::Part;

constexpr double kTolerance = 1e-4;
constexpr int64_t kLength = 24;

std::string ModelFolder(const std::string& name) {
  const char* source = std::getenv("KVASIR_SOURCE_DIR");
  return absl::StrCat(source == nullptr ? "." : source, "/tests/golden/models/",
                      name);
}

double RelativeError(const at::Tensor& have, const at::Tensor& want) {
  return ((have - want).norm() / want.norm()).item<double>();
}

// A function that makes a plan with one method.
using Planner = std::function<absl::StatusOr<KvPlan>(PlanRequest request)>;

// Test fixture: a small checkpoint with its calibration.
class MethodIdentitiesTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    // More threads would not help with such small tensors.
    at::set_num_threads(1);
    auto checkpoint = model::Checkpoint::Open(ModelFolder(GetParam()));
    KVASIR_ASSERT_OK(checkpoint);
    checkpoint_.emplace(*std::move(checkpoint));
    at::manual_seed(3);
    ids_ = RandomIds(2);
    Calibrate();
    for (int64_t layer = 0; layer < spec().num_layers(); ++layer) {
      auto tensors = LoadLayer(*checkpoint_, layer);
      KVASIR_ASSERT_OK(tensors);
      layers_.push_back(*std::move(tensors));
    }
    auto outer = LoadOuterTensors(*checkpoint_);
    KVASIR_ASSERT_OK(outer);
    outer_ = *std::move(outer);
    teacher_ = Logits(std::nullopt, layers_);
  }

  const model::DecoderSpec& spec() const { return checkpoint_->spec(); }
  const at::Tensor& teacher() const { return teacher_; }

  PlanRequest Request(double keep) const {
    PlanRequest request;
    request.spec = spec();
    request.calibration = &calibration_;
    request.weights = [this](int64_t layer) { return Attention(layer); };
    request.keep = keep;
    request.rank_multiple = 1;
    request.key_codec.set_dtype(kvasir::v1::F32);
    request.value_codec.set_dtype(kvasir::v1::F32);
    return request;
  }

  // Returns the projections of the uncompressed layer.
  AttentionWeights Attention(int64_t layer) const {
    const TensorMap& tensors = layers_[static_cast<size_t>(layer)];
    const auto get = [&](const std::string& name) {
      const auto found = tensors.find("self_attn." + name);
      return found == tensors.end() ? at::Tensor() : found->second;
    };
    return {get("q_proj.weight"), get("k_proj.weight"), get("v_proj.weight"),
            get("o_proj.weight"), get("q_proj.bias"),   get("k_proj.bias"),
            get("v_proj.bias"),   get("o_proj.bias")};
  }

  // Returns the attention tensors of a layer under the plan.
  absl::StatusOr<TensorMap> AppliedLayer(
      const KvPlan& plan, int64_t l,
      Decomposition decomposition = Decomposition::kWhitened,
      bool split_singular_values = false) const {
    const auto layer = static_cast<size_t>(l);
    ApplyRequest request;
    request.spec = &spec();
    request.plan = &plan.layers(static_cast<int>(l));
    request.layer = l;
    request.weights = Attention(l);
    request.calibration = &calibration_.layers[layer];
    request.num_tokens = calibration_.num_tokens;
    request.decomposition = decomposition;
    request.split_singular_values = split_singular_values;
    request.commuting = CommutingWeightsOf(plan);
    return ApplyLayerPlan(request);
  }

  // Returns the logits of the model with the plan's tensors.
  at::Tensor LogitsUnder(const KvPlan& plan,
                         Decomposition decomposition = Decomposition::kWhitened,
                         bool split_singular_values = false) const {
    std::vector<TensorMap> layers = layers_;
    for (int64_t l = 0; l < spec().num_layers(); ++l) {
      const auto layer = static_cast<size_t>(l);
      auto tensors =
          AppliedLayer(plan, l, decomposition, split_singular_values);
      KVASIR_EXPECT_OK(tensors);
      if (!tensors.ok()) return at::zeros_like(teacher_);
      for (auto it = layers[layer].begin(); it != layers[layer].end();) {
        it = it->first.starts_with("self_attn.") ? layers[layer].erase(it)
                                                 : std::next(it);
      }
      layers[layer].merge(*tensors);
    }
    return Logits(plan, std::move(layers));
  }

  at::Tensor Logits(const std::optional<KvPlan>& plan,
                    std::vector<TensorMap> layers) const {
    const auto decoder = ReferenceDecoder::FromTensors(
        {spec(), plan, outer_, std::move(layers)}, {.without_ranges = true});
    KVASIR_EXPECT_OK(decoder);
    if (!decoder.ok()) return at::zeros_like(ids_);
    // Latents are not coded, because codes with few bits would cause larger
    // errors than those that are tested.
    const auto logits = decoder->Logits(ids_, {.code_latents = false});
    KVASIR_EXPECT_OK(logits);
    return logits.ok() ? *logits : at::zeros_like(ids_);
  }

  std::vector<TensorMap> layers_;  // tensors of the uncompressed layers

 private:
  at::Tensor RandomIds(int64_t sequences) const {
    return at::randint(spec().vocab_size, {sequences, kLength}, at::kLong);
  }

  void Calibrate() {
    constexpr int64_t kSequences = 3;
    const at::Tensor ids = RandomIds(kSequences);
    CalibrationSample sample{.sequence_tokens = kLength};
    for (int64_t s = 0; s < kSequences; ++s) {
      const int64_t* row = ids[s].data_ptr<int64_t>();
      sample.sequences.emplace_back(row, row + kLength);
    }
    CalibrateOptions options;
    options.parts = {.fisher = true, .rotated_keys = true};
    auto run =
        compress::Calibrate(*checkpoint_, sample, options,
                            {.on_progress = [](const auto&) { return true; },
                             .on_message = [](const auto&) {}});
    KVASIR_ASSERT_OK(run);
    calibration_ = run->calibration;
  }

  std::optional<model::Checkpoint> checkpoint_;
  Calibration calibration_;
  OuterTensors outer_;
  at::Tensor ids_;
  at::Tensor teacher_;
};

// Fixture for models in which RoPE rotates whole heads.
class PrunedPairsTest : public MethodIdentitiesTest {};

std::string TestName(const ::testing::TestParamInfo<const char*>& test) {
  std::string name = test.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

// These models cover grouped and plain multi-head attention, biases, a single
// KV head, and YaRN's factor.
constexpr const char* kRotaryModels[] = {"llama-gqa-tied", "llama-mha",
                                         "qwen2-untied", "llama-mqa-head-dim",
                                         "llama-yarn-attention-factor"};
INSTANTIATE_TEST_SUITE_P(Models, PrunedPairsTest,
                         ::testing::ValuesIn(kRotaryModels), TestName);
INSTANTIATE_TEST_SUITE_P(Models, MethodIdentitiesTest,
                         ::testing::ValuesIn(kRotaryModels), TestName);
// These models rotate only a part of each head or have no RoPE.
INSTANTIATE_TEST_SUITE_P(LayerNormModels, MethodIdentitiesTest,
                         ::testing::Values("neox-parallel-quarter",
                                           "neox-serial-half", "opt-tied"),
                         TestName);

struct NamedPlanner {
  std::string name;
  Planner plan;
};

// Returns a planner for every method and each group size that the heads allow.
std::vector<NamedPlanner> Methods(const model::DecoderSpec& spec) {
  std::vector<NamedPlanner> methods;
  for (const int64_t group_heads : {1, 2, 0}) {
    if (group_heads > 0 && spec.num_kv_heads % group_heads != 0) continue;
    for (const bool hadamard : {false, true}) {
      methods.push_back({absl::StrCat("palu, groups of ", group_heads,
                                      hadamard ? ", Hadamard" : ""),
                         [=](PlanRequest request) {
                           PaluOptions options;
                           options.group_heads = group_heads;
                           options.hadamard = hadamard;
                           return PlanPalu(request, options);
                         }});
    }
    methods.push_back({absl::StrCat("commuting, groups of ", group_heads),
                       [=](PlanRequest request) {
                         return PlanCommuting(request,
                                              {.group_heads = group_heads});
                       }});
  }
  methods.push_back(
      {"rap", [](PlanRequest request) { return PlanRap(request, {}); }});
  methods.push_back(
      {"lorc", [](PlanRequest request) { return PlanLorc(request, {}); }});
  return methods;
}

TEST_P(MethodIdentitiesTest, KeepingEverythingGivesTheTeachersLogits) {
  PlanRequest request = Request(1.0);
  // Without codes, FinishPlan would replace latents of full rank by whole keys
  // and values. So codes are set here, but LogitsUnder does not apply them.
  for (Codec* codec : {&request.key_codec, &request.value_codec}) {
    codec->mutable_bits()->add_schedule(8);
    codec->mutable_per_token();
    codec->set_param_dtype(kvasir::v1::F16);
  }
  for (const NamedPlanner& method : Methods(spec())) {
    const auto plan = method.plan(request);
    KVASIR_ASSERT_OK(plan);
    EXPECT_LE(RelativeError(LogitsUnder(*plan), teacher()), kTolerance)
        << method.name;
    EXPECT_LE(RelativeError(LogitsUnder(*plan, Decomposition::kSvd), teacher()),
              kTolerance)
        << method.name << " by plain SVD";
  }
}

TEST_P(MethodIdentitiesTest, ABasisOfFullRankGivesTheTeachersLogits) {
  for (const bool post_rope : {false, true}) {
    if (spec().num_kv_heads * spec().head_dim % 8 != 0) continue;
    const auto plan = PlanSvdq(
        Request(1.0),
        {.schedule = {8, 8, 8, 8, 8, 8, 8, 8}, .post_rope = post_rope});
    KVASIR_ASSERT_OK(plan);
    EXPECT_LE(RelativeError(LogitsUnder(*plan), teacher()), kTolerance)
        << "post_rope " << post_rope;
  }
}

TEST_P(MethodIdentitiesTest,
       APlanOfChannelCodesGivesTheTeachersLogitsIfCodesAreNotApplied) {
  for (const bool post_rope : {false, true}) {
    const auto plan = PlanChannelCodes(
        Request(1.0), {.post_rope = post_rope, .value_bits = 4});
    KVASIR_ASSERT_OK(plan);
    EXPECT_LE(RelativeError(LogitsUnder(*plan), teacher()), kTolerance)
        << "post_rope " << post_rope;
  }
}

TEST_P(MethodIdentitiesTest,
       EveryDecompositionCanBeAppliedWithHalfOfTheNumbersKept) {
  for (const Decomposition decomposition :
       {Decomposition::kSvd, Decomposition::kWhitened,
        Decomposition::kEspace}) {
    const auto plan = PlanPalu(
        Request(0.5), {.group_heads = 0, .decomposition = decomposition});
    KVASIR_ASSERT_OK(plan);
    const double error =
        RelativeError(LogitsUnder(*plan, decomposition), teacher());
    EXPECT_GT(error, 10 * kTolerance);
    // If the logits were unrelated to the teacher's, the error would be about
    // sqrt(2).
    EXPECT_LT(error, 1.2);
  }
}

TEST_P(MethodIdentitiesTest, SplittingTheSingularValuesDoesNotChangeTheLogits) {
  const auto plan = PlanPalu(Request(0.5), {.group_heads = 0});
  KVASIR_ASSERT_OK(plan);
  EXPECT_LE(RelativeError(LogitsUnder(*plan, Decomposition::kWhitened,
                                      /*split_singular_values=*/true),
                          LogitsUnder(*plan)),
            kTolerance);
}

TEST_P(PrunedPairsTest, PruningRopePairsInTheModelEqualsMaskingThem) {
  RapOptions options;
  options.budget = {.score = BudgetScore::kUniform, .keep_values = true};
  const auto plan = PlanRap(Request(0.75), options);
  KVASIR_ASSERT_OK(plan);
  std::vector<TensorMap> masked = layers_;
  for (int l = 0; l < plan->layers_size(); ++l) {
    at::Tensor mask = at::zeros({spec().num_kv_heads, spec().head_dim});
    const auto& heads = plan->layers(l).key().parts(0).rope_pairs().per_head();
    for (int head = 0; head < heads.size(); ++head) {
      for (const uint32_t pair : heads.Get(head).pair_indices()) {
        const PairDims dims = DimsOfPair(spec().rope, pair);
        mask[head][dims.first] = 1.0;
        mask[head][dims.second] = 1.0;
      }
    }
    TensorMap& tensors = masked[static_cast<size_t>(l)];
    at::Tensor& weight = tensors["self_attn.k_proj.weight"];
    weight = weight * mask.flatten().unsqueeze(1);
    if (spec().qkv_bias) {
      at::Tensor& bias = tensors["self_attn.k_proj.bias"];
      bias = bias * mask.flatten();
    }
  }
  const at::Tensor want = Logits(std::nullopt, std::move(masked));
  EXPECT_LE(RelativeError(LogitsUnder(*plan), want), kTolerance);
  EXPECT_GE(RelativeError(want, teacher()), 10 * kTolerance);
}

// Returns the plan with lifts folded if `fold` is true, otherwise with lifts
// applied at run time. All other uses of parts stay as they are.
KvPlan WithLifts(KvPlan plan, bool fold) {
  for (auto& layer : *plan.mutable_layers()) {
    for (auto* side : {layer.mutable_key(), layer.mutable_value()}) {
      for (Part& part : *side->mutable_parts()) {
        for (Part::Use& use : *part.mutable_uses()) {
          if (!use.has_fold() && !use.has_at_runtime()) continue;
          fold ? (void)use.mutable_fold() : (void)use.mutable_at_runtime();
        }
      }
    }
  }
  return plan;
}

TEST_P(MethodIdentitiesTest, FoldedAndRuntimeLiftsGiveTheSameLogits) {
  for (const NamedPlanner& method : Methods(spec())) {
    const auto plan = method.plan(Request(0.6));
    KVASIR_ASSERT_OK(plan);
    const at::Tensor folded = LogitsUnder(WithLifts(*plan, true));
    EXPECT_LE(RelativeError(LogitsUnder(WithLifts(*plan, false)), folded),
              kTolerance)
        << method.name;
    EXPECT_GE(RelativeError(folded, teacher()), 10 * kTolerance)
        << method.name << " left nothing out";
  }
}

TEST_P(MethodIdentitiesTest, AFusedHadamardTransformDoesNotChangeTheLogits) {
  PaluOptions options;
  options.group_heads = 0;
  options.search = RankSearch::kUniform;
  const auto plain = PlanPalu(Request(0.5), options);
  options.hadamard = true;
  const auto rotated = PlanPalu(Request(0.5), options);
  KVASIR_ASSERT_OK(plain);
  KVASIR_ASSERT_OK(rotated);
  EXPECT_LE(RelativeError(LogitsUnder(*rotated), LogitsUnder(*plain)),
            kTolerance);
  const std::string down = "self_attn.v_proj.down.weight";
  auto rotated_layer = AppliedLayer(*rotated, 0);
  auto plain_layer = AppliedLayer(*plain, 0);
  KVASIR_ASSERT_OK(rotated_layer);
  KVASIR_ASSERT_OK(plain_layer);
  EXPECT_GE(RelativeError(rotated_layer->at(down), plain_layer->at(down)), 0.1);
}

}  // namespace
}  // namespace kvasir::compress
