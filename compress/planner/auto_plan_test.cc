#include "compress/planner/auto_plan.h"

#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "cache/layout/layout.h"
#include "compress/testing/planner_fixture.h"

namespace kvasir::compress {
namespace {

using ::testing::HasSubstr;

// Test fixture: a model with random weights and a calibration of random inputs.
// Channels differ much in variance and in importance.
class AutoPlanTest : public ::testing::Test {
 protected:
  explicit AutoPlanTest(TinyModel model = {.layers = 2, .kv_heads = 2}) {
    // The tensors are so small that more threads are slower.
    at::set_num_threads(1);
    request_ = RequestOf(model);
    request_.spec.max_position_embeddings = 512;
    const model::DecoderSpec& spec = request_.spec;
    const int64_t width = spec.num_kv_heads * spec.head_dim;
    const int64_t hidden = spec.hidden_size;
    calibration_.id = "test-calibration";
    calibration_.num_tokens = kTokens;
    for (int64_t l = 0; l < spec.num_layers(); ++l) {
      const auto seed = static_cast<uint64_t>(100 * l);
      AttentionWeights weights;
      weights.key = RandomMatrix({width, hidden}, seed + 1) / 4;
      weights.value = RandomMatrix({width, hidden}, seed + 2) / 8;
      weights_.push_back(weights);
      const at::Tensor inputs = RandomMatrix({kTokens, hidden}, seed + 3) *
                                    RandomMatrix({hidden}, seed + 4).exp() +
                                RandomMatrix({hidden}, seed + 5) / 2;
      LayerCalibration layer;
      layer.input_gram = inputs.t().mm(inputs).to(at::kDouble);
      layer.input_sum = inputs.sum(0).to(at::kDouble);
      layer.sample_rows = at::cat(
          {inputs.mm(weights.key.t()), inputs.mm(weights.value.t())}, 1);
      const at::Tensor token = at::arange(kTokens, at::kLong);
      layer.sample_positions = token.remainder(64);
      layer.sample_domains = token.remainder(2);
      layer.sample_held_out = token.div(64, "floor").remainder(4) == 3;
      for (const char* name : {"books", "code"}) {
        DomainInformation domain;
        domain.name = name;
        domain.tokens = kTokens / 2;
        domain.key_information = Information(width, seed + 6);
        domain.value_information = Information(width, seed + 8);
        layer.domains.push_back(domain);
      }
      layer.key_information = layer.domains[0].key_information.to(at::kDouble);
      layer.value_information =
          layer.domains[0].value_information.to(at::kDouble);
      calibration_.layers.push_back(std::move(layer));
    }
    request_.calibration = &calibration_;
    request_.weights = [this](int64_t layer) {
      return weights_[static_cast<size_t>(layer)];
    };
  }

  static at::Tensor Information(int64_t width, uint64_t seed) {
    const at::Tensor gradients = RandomMatrix({4 * width, width}, seed) *
                                 RandomMatrix({width}, seed + 1).exp() / 200;
    return gradients.t().mm(gradients);
  }

  static AutoOptions Options(PlanSpeed speed = PlanSpeed::kCpu) {
    return {.speed = speed, .windows = {0}, .exact_sinks = 0};
  }

  absl::StatusOr<AutoPlan> Plan(const AutoOptions& options) const {
    return PlanAuto(request_, options);
  }

  double BytesOf(const kvasir::v1::KvPlan& plan, int64_t granule) const {
    const auto layout =
        cache::PageLayout::Create(plan, model::AttentionShapeOf(request_.spec),
                                  {.granule_bytes = granule});
    KVASIR_EXPECT_OK(layout);
    return layout.ok() ? layout->marginal_bytes_per_token() : 0;
  }

  static constexpr int64_t kTokens = 768;

  PlanRequest request_;
  Calibration calibration_;
  std::vector<AttentionWeights> weights_;
};

// The model has 2 layers of 64 numbers, so 128 numbers per token; each bit per
// number takes 16 bytes.
TEST_F(AutoPlanTest, PredictedBytesAreThoseOfPagesWithinTheBudget) {
  for (const int64_t granule : {0, 1, 16}) {
    for (const double bytes : {40.0, 63.0, 90.0}) {
      AutoOptions options = Options();
      options.kv_bytes_per_token = bytes + (granule == 16 ? 100 : 0);
      options.granule_bytes = granule;
      KVASIR_ASSERT_OK_AND_ASSIGN(const AutoPlan made, Plan(options));
      EXPECT_EQ(made.prediction.marginal_bytes, BytesOf(made.plan, granule));
      EXPECT_LE(made.prediction.bytes, *options.kv_bytes_per_token);
      if (granule < 16) {
        EXPECT_GT(made.prediction.bytes, *options.kv_bytes_per_token - 8);
      }
    }
  }
}

TEST_F(AutoPlanTest, TensorParallelRanksStoreDifferentDataInEqualPages) {
  for (const PlanSpeed speed : {PlanSpeed::kCpu, PlanSpeed::kStorage}) {
    AutoOptions options = Options(speed);
    options.kv_bytes_per_token = 60;
    request_.tp = 2;
    KVASIR_ASSERT_OK_AND_ASSIGN(const AutoPlan two, Plan(options));
    ExpectEqualRanks(two.plan, request_.spec);
    EXPECT_LE(two.prediction.bytes, 60);
    // With 4 tensor-parallel ranks two ranks share each head; the plan takes
    // the same bytes as with 2 ranks.
    request_.tp = 4;
    KVASIR_ASSERT_OK_AND_ASSIGN(const AutoPlan four, Plan(options));
    EXPECT_EQ(four.plan.target().tp(), 4u);
    EXPECT_EQ(four.prediction.bytes, two.prediction.bytes);
  }
}

TEST_F(AutoPlanTest, ThePredictedLossNeverGrowsWithTheBytes) {
  double last = 1e30;
  for (const double bytes : {24.0, 40.0, 60.0, 80.0}) {
    AutoOptions options = Options(PlanSpeed::kStorage);
    options.kv_bytes_per_token = bytes;
    KVASIR_ASSERT_OK_AND_ASSIGN(const AutoPlan made, Plan(options));
    EXPECT_LE(made.prediction.kl, last);
    last = made.prediction.kl;
    for (size_t i = 1; i < made.prediction.curve.size(); ++i) {
      EXPECT_LE(made.prediction.curve[i].kl, made.prediction.curve[i - 1].kl);
    }
  }
}

TEST_F(AutoPlanTest, AGivenLossIsReachedWithTheFewestBytes) {
  AutoOptions options = Options(PlanSpeed::kStorage);
  options.kv_bytes_per_token = 60;
  KVASIR_ASSERT_OK_AND_ASSIGN(const AutoPlan by_bytes, Plan(options));
  options = Options(PlanSpeed::kStorage);
  options.max_kl = by_bytes.prediction.kl;
  KVASIR_ASSERT_OK_AND_ASSIGN(const AutoPlan by_loss, Plan(options));
  EXPECT_LE(by_loss.prediction.kl, *options.max_kl);
  EXPECT_LE(by_loss.prediction.bytes, by_bytes.prediction.bytes);
  // With two bytes fewer the loss must be larger.
  options = Options(PlanSpeed::kStorage);
  options.kv_bytes_per_token = by_loss.prediction.bytes - 2;
  KVASIR_ASSERT_OK_AND_ASSIGN(const AutoPlan fewer, Plan(options));
  EXPECT_GT(fewer.prediction.kl, by_bytes.prediction.kl);
}

// The simulated measurements are about 2.5 times the predictions.
TEST_F(AutoPlanTest, ProbesFindTheFactorBetweenPredictedAndMeasuredLoss) {
  constexpr double kTrue = 2.5;
  AutoOptions options = Options(PlanSpeed::kStorage);
  options.kv_bytes_per_token = 50;
  KVASIR_ASSERT_OK_AND_ASSIGN(const AutoPlan untried, Plan(options));
  // Plans once to learn the predictions of the plans that will be measured.
  options.probes = 5;
  options.measure = [](const kvasir::v1::KvPlan&) { return 1.0; };
  KVASIR_ASSERT_OK_AND_ASSIGN(const AutoPlan first, Plan(options));
  const std::vector<PlanTrial>& trials = first.prediction.kappa.trials;
  ASSERT_EQ(trials.size(), 5u);
  EXPECT_NEAR(trials[0].bytes, 30, 3);
  EXPECT_NEAR(trials[4].bytes, 70, 3);
  const double shares[] = {0.8, 0.9, 1.0, 1.1, 1.2};
  size_t next = 0;
  options.measure = [&](const kvasir::v1::KvPlan&) {
    const double share = shares[next];
    return kTrue * share * trials[next++].predicted;
  };
  KVASIR_ASSERT_OK_AND_ASSIGN(const AutoPlan tried, Plan(options));
  const AutoPrediction& prediction = tried.prediction;
  EXPECT_NEAR(prediction.kappa.median, kTrue, 1e-9);
  EXPECT_NEAR(prediction.kappa.low, kTrue * 0.864, 1e-9);
  EXPECT_EQ(prediction.kappa.spearman, 1.0);
  EXPECT_NEAR(prediction.kl, kTrue * untried.prediction.kl, 1e-9);
  EXPECT_NEAR(prediction.kl_high(), 1.136 * prediction.kl, 1e-9);
  EXPECT_EQ(prediction.bytes, untried.prediction.bytes);

  // If a divergence is requested, the plan is chosen with the fitted kappa.
  options.kv_bytes_per_token.reset();
  options.max_kl = untried.prediction.kl;
  options.probes = 1;
  options.measure = [&](const kvasir::v1::KvPlan&) {
    return 2 * untried.prediction.kl;
  };
  KVASIR_ASSERT_OK_AND_ASSIGN(const AutoPlan by_loss, Plan(options));
  EXPECT_LE(by_loss.prediction.kl, *options.max_kl);
  EXPECT_GT(by_loss.prediction.bytes, untried.prediction.bytes);
}

// Probes are measured on short sequences, in which a window would hide most of
// the codes. Measurements with a window would therefore say little about the
// codes.
TEST_F(AutoPlanTest, ProbesAreMeasuredWithoutAnExactWindow) {
  AutoOptions options = Options();
  options.kv_bytes_per_token = 60;
  options.windows = {2};
  KVASIR_ASSERT_OK_AND_ASSIGN(const AutoPlan untried, Plan(options));
  options.probes = 3;
  int64_t windows = 0;
  options.measure = [&](const kvasir::v1::KvPlan& plan) {
    for (const kvasir::v1::LayerPlan& layer : plan.layers()) {
      windows += layer.key().exact_window() + layer.value().exact_window();
    }
    return 1.0;
  };
  KVASIR_ASSERT_OK_AND_ASSIGN(const AutoPlan tried, Plan(options));
  EXPECT_EQ(tried.prediction.kappa.trials.size(), 3u);
  EXPECT_EQ(windows, 0);
  EXPECT_EQ(tried.prediction.exact_window, 2);
  EXPECT_EQ(tried.prediction.bytes, untried.prediction.bytes);
}

TEST_F(AutoPlanTest, TooManyProbesAndFailedProbesAreErrors) {
  AutoOptions options = Options();
  options.kv_bytes_per_token = 60;
  for (const int probes : {-1, kMostProbes + 1}) {
    options.probes = probes;
    EXPECT_THAT(Plan(options).status(),
                base::StatusIs(absl::StatusCode::kInvalidArgument,
                               HasSubstr("probes must be 0 to 32")));
  }
  options.probes = 1;
  options.measure = [](const kvasir::v1::KvPlan&) -> absl::StatusOr<double> {
    return absl::CancelledError("enough");
  };
  EXPECT_EQ(Plan(options).status().code(), absl::StatusCode::kCancelled);
}

TEST_F(AutoPlanTest, ABudgetThatNoPlanMeetsIsRefusedWithTheReason) {
  AutoOptions options = Options();
  options.kv_bytes_per_token = 1;
  EXPECT_THAT(Plan(options).status().message(),
              HasSubstr("1.0 bytes per token are too few: the smallest"));
  options = Options();
  options.max_kl = 1e-12;
  EXPECT_THAT(Plan(options).status().message(),
              HasSubstr("no plan is predicted to diverge by 1e-12"));
  options.kv_bytes_per_token = 60;
  EXPECT_THAT(Plan(options).status().message(),
              HasSubstr("more than the 0.0000 of --max-kl"));
  options = Options();
  EXPECT_FALSE(Plan(options).ok());
}

TEST_F(AutoPlanTest, MoreBytesThanAnyPlanTakesCauseNoOverflow) {
  AutoOptions options = Options();
  options.kv_bytes_per_token = 1e20;
  KVASIR_ASSERT_OK_AND_ASSIGN(const AutoPlan all, Plan(options));
  options.kv_bytes_per_token = 4096;  // far more bytes than any plan takes
  KVASIR_ASSERT_OK_AND_ASSIGN(const AutoPlan many, Plan(options));
  EXPECT_EQ(all.prediction.bytes, many.prediction.bytes);
}

TEST_F(AutoPlanTest, WindowsAsLongAsTheTargetLengthAreRefused) {
  AutoOptions options = Options();
  options.kv_bytes_per_token = 60;
  options.windows = {64, 128};
  options.target_length = 64;
  EXPECT_THAT(Plan(options).status(),
              base::StatusIs(absl::StatusCode::kInvalidArgument,
                             HasSubstr("window has 64 tokens, but must be "
                                       "shorter than the target length")));
}

TEST_F(AutoPlanTest, ACpuPlanRebuildsNoKeysAndIsNoSlowerThanADenseCache) {
  AutoOptions options = Options();
  options.kv_bytes_per_token = 60;
  KVASIR_ASSERT_OK_AND_ASSIGN(const AutoPlan made, Plan(options));
  for (const auto& layer : made.plan.layers()) {
    EXPECT_EQ(layer.joint_size(), 0);
    const kvasir::v1::Part& key = layer.key().parts(0);
    EXPECT_EQ(key.stored(), kvasir::v1::POST_ROPE);
    EXPECT_TRUE(key.has_full() || key.has_rope_low_rank());
  }
  EXPECT_GT(made.prediction.slot_ns, 0);
  EXPECT_LE(made.prediction.slot_ns, made.prediction.dense_slot_ns);
}

TEST_F(AutoPlanTest, KeysAndValuesOfAStoragePlanMayShareALatent) {
  AutoOptions options = Options(PlanSpeed::kStorage);
  options.kv_bytes_per_token = 40;
  KVASIR_ASSERT_OK_AND_ASSIGN(const AutoPlan storage, Plan(options));
  EXPECT_EQ(storage.prediction.marginal_bytes, BytesOf(storage.plan, 0));
  options = Options();
  options.kv_bytes_per_token = 40;
  KVASIR_ASSERT_OK_AND_ASSIGN(const AutoPlan cpu, Plan(options));
  // With kStorage more spaces are allowed and time does not matter, so the loss
  // is not larger.
  EXPECT_LE(storage.prediction.kl, cpu.prediction.kl);
  // Joint latents pay off here, because the inputs have fewer numbers than keys
  // and values together.
  int64_t joint = 0;
  for (const auto& layer : storage.plan.layers()) joint += layer.joint_size();
  EXPECT_GT(joint, 0);
}

TEST_F(AutoPlanTest, TheBytesOfExactWindowsAreDividedByTheTargetLength) {
  AutoOptions options = Options();
  options.kv_bytes_per_token = 70;
  options.windows = {64};
  options.target_length = 512;
  KVASIR_ASSERT_OK_AND_ASSIGN(const AutoPlan made, Plan(options));
  const AutoPrediction& prediction = made.prediction;
  EXPECT_EQ(made.plan.layers(0).key().exact_window(), 64u);
  EXPECT_GT(prediction.fixed_bytes, 0);
  EXPECT_EQ(prediction.bytes,
            prediction.marginal_bytes + prediction.fixed_bytes / 512);
  EXPECT_LE(prediction.bytes, 70);
}

// An exact window removes a larger share of the loss of rotated codes than of
// the loss of codes in static ranges.
TEST_F(AutoPlanTest, WithAnExactWindowMorePartsAreStoredAsRotatedHeads) {
  // Gives the keys and values of different tokens different lengths. Codes with
  // a scale per token suit such data.
  at::Tensor& rows = calibration_.layers[1].sample_rows;
  rows = rows * RandomMatrix({rows.size(0), 1}, 77).exp();
  const auto rotated = [&](int64_t window, double kappa) {
    int parts = 0;
    for (const double bytes : {32, 40, 50, 60, 80, 100}) {
      AutoOptions options = Options();
      options.kv_bytes_per_token = bytes;
      options.windows = {window};
      options.target_length = int64_t{1} << 20;
      options.kappa = kappa;
      const absl::StatusOr<AutoPlan> planned = Plan(options);
      KVASIR_EXPECT_OK(planned);
      if (!planned.ok()) continue;
      const AutoPlan& made = *planned;
      double layers_sum = 0;
      for (const LayerChoice& layer : made.prediction.layers) {
        layers_sum += layer.loss;
      }
      EXPECT_NEAR(layers_sum, made.prediction.kl, 1e-9 * made.prediction.kl);
      for (const auto& layer : made.plan.layers()) {
        parts += layer.key().parts(0).has_full();
        parts += layer.value().parts(0).has_full();
      }
    }
    return parts;
  };
  const int without = rotated(0, 1);
  EXPECT_EQ(rotated(0, 3), without);
  EXPECT_GT(rotated(256, 1), without);
}

TEST_F(AutoPlanTest, TheLossRatioOfSimilarDomainsCausesNoWarning) {
  AutoOptions options = Options();
  options.kv_bytes_per_token = 60;
  KVASIR_ASSERT_OK_AND_ASSIGN(const AutoPlan made, Plan(options));
  ASSERT_EQ(made.prediction.domains.size(), 2u);
  for (const DomainLoss& domain : made.prediction.domains) {
    EXPECT_LT(domain.ratio(), kDomainWarning) << domain.name;
  }
  EXPECT_LE(made.prediction.low, made.prediction.kl);
  EXPECT_GE(made.prediction.high, made.prediction.kl);
  EXPECT_LT(made.prediction.held_out_loss_ratio, 1.5);
}

// One domain gets other statistics than the rest, so ranges fitted to the rest
// are wrong for it.
TEST_F(AutoPlanTest, ADomainThatDiffersFromTheOthersHasALargeLossRatio) {
  for (LayerCalibration& layer : calibration_.layers) {
    const at::Tensor strange = (layer.sample_domains == 1).unsqueeze(1);
    layer.sample_rows = at::where(strange, layer.sample_rows.flip(1) * 3 + 2,
                                  layer.sample_rows);
  }
  AutoOptions options = Options();
  options.kv_bytes_per_token = 60;
  KVASIR_ASSERT_OK_AND_ASSIGN(const AutoPlan made, Plan(options));
  EXPECT_GT(made.prediction.domains[1].ratio(), kDomainWarning);
}

// If a loss could not be measured, it must be missing in the prediction, and
// not reported as 0.
TEST_F(AutoPlanTest, NoLossIsPredictedForADomainWithTooFewRows) {
  for (LayerCalibration& layer : calibration_.layers) {
    layer.sample_domains = at::zeros_like(layer.sample_domains);
    layer.sample_domains[0] = 1;
  }
  // Gives the keys and values of different tokens different lengths. Codes with
  // a scale per token suit such data.
  at::Tensor& rows = calibration_.layers[1].sample_rows;
  rows = rows * (2 * RandomMatrix({rows.size(0), 1}, 77)).exp();
  bool has_mixed = false;  // true if a plan mixes both kinds of parts
  for (const double bytes : {32, 40, 50, 60, 80, 100}) {
    AutoOptions options = Options();
    options.kv_bytes_per_token = bytes;
    KVASIR_ASSERT_OK_AND_ASSIGN(const AutoPlan made, Plan(options));
    EXPECT_THAT(made.prediction.domains, ::testing::IsEmpty());
    EXPECT_EQ(made.prediction.low, made.prediction.kl);
    EXPECT_EQ(made.prediction.high, made.prediction.kl);
    int whole = 0;
    int parts = 0;
    for (const auto& layer : made.plan.layers()) {
      for (const auto* side : {&layer.key(), &layer.value()}) {
        ++parts;
        if (side->parts(0).has_full()) ++whole;
      }
    }
    has_mixed = has_mixed || (whole > 0 && whole < parts);
  }
  EXPECT_TRUE(has_mixed);
}

TEST_F(AutoPlanTest, ModelsThatRotateOnlyAPartOfAHeadAreRefused) {
  request_.spec.rope.rotary_dim = request_.spec.head_dim / 2;
  EXPECT_THAT(
      PlanAuto(request_, {.kv_bytes_per_token = 1000}).status(),
      base::StatusIs(absl::StatusCode::kUnimplemented,
                     ::testing::HasSubstr("needs RoPE on all dims of a head")));
}

TEST_F(AutoPlanTest, ACalibrationWithoutFisherInformationIsRefused) {
  calibration_.layers[0].key_information = at::Tensor();
  AutoOptions options = Options();
  options.kv_bytes_per_token = 60;
  EXPECT_EQ(Plan(options).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace kvasir::compress
