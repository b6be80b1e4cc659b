#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "compress/calibrate/calibrate.h"
#include "compress/calibrate/calibration_cost.h"
#include "compress/calibrate/head_loss.h"
#include "compress/oracle/reference_decoder.h"
#include "compress/tensors/attention_loader.h"
#include "compress/testing/calibrate_fixture.h"

namespace kvasir::compress {
namespace {

using ::kvasir::base::StatusIs;
using ::testing::HasSubstr;

constexpr CalibrationParts kInformation = {.fisher = false,
                                           .information = true};

// Number of key dims of a token: 2 heads with 6 dims.
constexpr int64_t kWidth = 12;

class InformationTest : public CalibrateTest {
 protected:
  // Returns sequences of three domains in turn. Each domain has one held-out
  // sequence, and each sequence two sink tokens.
  CalibrationSample DomainSample() const {
    CalibrationSample sample = Sample(9, 10);
    sample.domains = {"a", "b", "c"};
    for (int64_t i = 0; i < 9; ++i) sample.sequence_domains.push_back(i % 3);
    sample.held_out_sequences = 3;
    sample.sink_tokens = 2;
    return sample;
  }

  Recorder Record(const CalibrationSample& sample) const {
    Recorder recorder;
    const absl::StatusOr<ReferenceDecoder> decoder =
        ReferenceDecoder::Load(*checkpoint_, std::nullopt);
    KVASIR_EXPECT_OK(decoder.status());
    for (const std::vector<int32_t>& sequence : sample.sequences) {
      KVASIR_EXPECT_OK(
          decoder->Logits(Ids(sequence), {.observer = &recorder}).status());
    }
    return recorder;
  }
};

// Adds an error to the key before its rotation, or to the value, of one token
// in one layer.
class OneError : public CacheTransform {
 public:
  int64_t layer = 0;
  int64_t token = 0;
  bool of_key = true;
  at::Tensor error;  // [Hkv * D] float32

  absl::StatusOr<Seen> Key(int64_t at, const at::Tensor& key) const override {
    return Seen{of_key && at == layer ? With(key) : key};
  }
  absl::StatusOr<Seen> Value(int64_t at,
                             const at::Tensor& value) const override {
    return Seen{!of_key && at == layer ? With(value) : value};
  }

 private:
  at::Tensor With(const at::Tensor& heads) const {
    at::Tensor changed = heads.clone();
    changed[0][token] += error.view({heads.size(2), heads.size(3)});
    return changed;
  }
};

// Returns KL(p || q), summed over positions.
double Divergence(const at::Tensor& p_logits, const at::Tensor& q_logits) {
  const at::Tensor p = at::log_softmax(p_logits.to(at::kDouble), -1);
  const at::Tensor q = at::log_softmax(q_logits.to(at::kDouble), -1);
  return (p.exp() * (p - q)).sum().item<double>();
}

// Let KL_t be the divergence that the error e in the key or value of token t
// causes. To second order, the sum of KL_t over N tokens is N eT F e / 2, where
// F is the information. Each domain of the sample is a copy of the same
// sequence, but has labels of its own. So the domains give independent
// estimates of F, and their spread shows the error of their mean.
TEST_F(InformationTest,
       FisherInformationPredictsTheDivergenceThatASmallErrorCauses) {
  model::ModelShape shape = SmallShape();
  shape.num_layers = 2;
  Write(shape);
  constexpr int kCopies = 16;
  constexpr int64_t kTokens = 8;
  CalibrationSample sample = Sample(1, kTokens);
  const std::vector<int32_t> sequence = sample.sequences[0];
  sample.sequences.assign(kCopies, sequence);
  for (int64_t i = 0; i < kCopies; ++i) {
    sample.domains.push_back(absl::StrCat("copy", i));
    sample.sequence_domains.push_back(i);
  }
  CalibrateOptions options{.parts = kInformation};
  options.parts.labels_per_position = 128;
  KVASIR_ASSERT_OK_AND_ASSIGN(const CalibrationRun run, Run(sample, options));
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const ReferenceDecoder decoder,
      ReferenceDecoder::Load(*checkpoint_, std::nullopt));
  const at::Tensor want = *decoder.Logits(Ids(sequence));
  for (int64_t layer = 0; layer < 2; ++layer) {
    for (const bool of_key : {true, false}) {
      OneError one;
      one.layer = layer;
      one.of_key = of_key;
      const LayerCalibration& measured =
          run.calibration.layers[static_cast<size_t>(layer)];
      // The error changes many dims at once.
      at::Tensor direction =
          at::sin(at::arange(kWidth, at::kDouble) * 1.7 + 0.3 + of_key);
      const auto energy = [&](const at::Tensor& information) {
        return at::dot(direction, at::mv(information, direction))
            .item<double>();
      };
      const double mean = energy(of_key ? measured.key_information
                                        : measured.value_information);
      double variance = 0.0;
      for (const DomainInformation& copy : measured.domains) {
        const double off =
            energy((of_key ? copy.key_information : copy.value_information)
                       .to(at::kDouble)) -
            mean;
        variance += off * off / (kCopies - 1);
      }
      const double deviation = std::sqrt(variance / kCopies);
      EXPECT_LT(deviation, 0.1 * mean) << "raise labels_per_position";
      // Errors of this size are large compared with rounding, and small enough
      // that third-order terms do not matter.
      const double scale = std::sqrt(2e-5 / mean);
      double divergence = 0.0;
      for (const double sign : {1.0, -1.0}) {
        one.error = (direction * (sign * scale)).to(at::kFloat);
        for (one.token = 0; one.token < kTokens; ++one.token) {
          KVASIR_ASSERT_OK_AND_ASSIGN(
              const at::Tensor have,
              decoder.Logits(Ids(sequence), {.transform = &one}));
          divergence += Divergence(want, have) / 2.0;
        }
      }
      const double true_energy =
          2.0 * divergence / (scale * scale * static_cast<double>(kTokens));
      EXPECT_NEAR(true_energy, mean, 4.0 * deviation + 0.01 * mean)
          << "layer " << layer << (of_key ? " key" : " value");
    }
  }
}

TEST_F(InformationTest, FisherInformationIsTheMeanOverDomainsWeightedByTokens) {
  const CalibrationSample sample = DomainSample();
  KVASIR_ASSERT_OK_AND_ASSIGN(const CalibrationRun run,
                              Run(sample, {.parts = kInformation}));
  EXPECT_TRUE(run.calibration.has_information());
  EXPECT_FALSE(run.calibration.has_fisher());
  EXPECT_EQ(run.calibration.num_tokens, 6 * 8);
  EXPECT_EQ(run.calibration.num_sequences, 6);
  for (const LayerCalibration& layer : run.calibration.layers) {
    ASSERT_EQ(layer.domains.size(), 3U);
    at::Tensor key = at::zeros({kWidth, kWidth}, at::kDouble);
    for (const DomainInformation& domain : layer.domains) {
      EXPECT_EQ(domain.tokens, 16);
      key += domain.key_information.to(at::kDouble) / 3.0;
    }
    EXPECT_LT(RelativeError(key, layer.key_information), 1e-6);
    EXPECT_TRUE(at::equal(layer.key_information, layer.key_information.t()));
    EXPECT_GT(layer.value_information.diagonal().min().item<double>(), 0.0);
  }
  EXPECT_EQ(run.calibration.layers[2].domains[1].name, "b");
}

TEST_F(InformationTest, CalibrationSumsLeaveOutSinksAndHeldOutSequences) {
  const CalibrationSample sample = DomainSample();
  KVASIR_ASSERT_OK_AND_ASSIGN(const CalibrationRun run,
                              Run(sample, {.parts = kInformation}));
  const Recorder seen = Record(sample);
  for (size_t l = 0; l < 3; ++l) {
    const LayerCalibration& layer = run.calibration.layers[l];
    // The counted inputs: 9 sequences of 10 tokens, without the last 3
    // sequences (held out) and the first 2 tokens (sinks).
    const at::Tensor x = seen.inputs[l]
                             .view({9, 10, -1})
                             .slice(0, 0, 6)
                             .slice(1, 2)
                             .flatten(0, 1);
    EXPECT_LT(RelativeError(layer.input_gram, at::mm(x.t(), x)), 1e-6) << l;
    EXPECT_LT(RelativeError(layer.input_sum, x.sum(0)), 1e-6) << l;
  }
}

TEST_F(InformationTest,
       SampleRowsHoldKeysAndValuesWithTheirPositionsAndDomains) {
  const CalibrationSample sample = DomainSample();
  CalibrateOptions options{.parts = kInformation};
  options.parts.sample_rows = 20;  // of the 72 tokens that may be sampled
  KVASIR_ASSERT_OK_AND_ASSIGN(const CalibrationRun run, Run(sample, options));
  const Recorder seen = Record(sample);
  const std::vector<SampledRow> rows = SpreadRows(sample, 20);
  for (size_t l = 0; l < 3; ++l) {
    const LayerCalibration& layer = run.calibration.layers[l];
    ASSERT_EQ(layer.sample_rows.size(0), 20);
    std::vector<int64_t> domain_rows(3);
    int64_t held_out = 0;
    for (int64_t r = 0; r < 20; ++r) {
      const SampledRow& row = rows[static_cast<size_t>(r)];
      const int64_t at = row.sequence * 10 + row.position;
      const at::Tensor want = at::cat({seen.keys[l][at], seen.values[l][at]});
      EXPECT_LT(RelativeError(layer.sample_rows[r].to(at::kDouble), want), 1e-5)
          << l << " row " << r;
      const auto position = layer.sample_positions[r].item<int64_t>();
      EXPECT_EQ(position, row.position);
      EXPECT_GE(position, 2);
      const auto domain = layer.sample_domains[r].item<int64_t>();
      EXPECT_EQ(domain, row.sequence % 3);
      ++domain_rows[static_cast<size_t>(domain)];
      EXPECT_EQ(layer.sample_held_out[r].item<bool>(), row.sequence >= 6);
      held_out += row.sequence >= 6 ? 1 : 0;
    }
    for (const int64_t count : domain_rows) {
      EXPECT_NEAR(static_cast<double>(count), 20.0 / 3.0, 1.0);
    }
    EXPECT_NEAR(static_cast<double>(held_out), 20.0 / 3.0, 1.0);
  }
}

// Checks the formulas in calibration.h for moments, including biases.
TEST_F(InformationTest,
       MomentsOfKeysAndValuesFollowFromTheInputGramMatrixAndTheWeights) {
  CalibrationSample sample = DomainSample();
  sample.held_out_sequences = 0;
  KVASIR_ASSERT_OK_AND_ASSIGN(const CalibrationRun run,
                              Run(sample, {.parts = kInformation}));
  const auto tokens = static_cast<double>(run.calibration.num_tokens);
  for (int64_t l = 0; l < 3; ++l) {
    const LayerCalibration& layer =
        run.calibration.layers[static_cast<size_t>(l)];
    KVASIR_ASSERT_OK_AND_ASSIGN(const AttentionWeights weights,
                                LoadAttention(*checkpoint_, l));
    const at::Tensor w = weights.key.to(at::kDouble);
    const at::Tensor mean = layer.input_sum / tokens;
    const at::Tensor c = layer.input_gram / tokens - at::outer(mean, mean);
    // The keys of all 72 counted tokens.
    const at::Tensor keys =
        layer.sample_rows.slice(1, 0, kWidth).to(at::kDouble);
    ASSERT_EQ(keys.size(0), 72);
    const at::Tensor off = keys - keys.mean(0);
    EXPECT_LT(RelativeError(at::mm(at::mm(w, c), w.t()),
                            at::mm(off.t(), off) / tokens),
              1e-5);
    EXPECT_LT(RelativeError(at::mv(w, mean) + weights.key_bias.to(at::kDouble),
                            keys.mean(0)),
              1e-5);
  }
}

// The families include models without RoPE, models that rotate only a part of
// each head, and models with one KV head per query head.
TEST_F(InformationTest, FisherInformationIsMeasuredForEveryModelFamily) {
  for (const model::Family family :
       {model::Family::kLlama, model::Family::kNeox, model::Family::kOpt}) {
    model::ModelShape shape = SmallShape();
    shape.family = family;
    shape.qkv_bias = family != model::Family::kLlama;
    if (family != model::Family::kLlama) {
      shape.num_kv_heads = shape.num_query_heads;
      shape.rotary_part = family == model::Family::kOpt ? 0.0 : 0.34;
    }
    Write(shape);
    const CalibrationSample sample = DomainSample();
    KVASIR_ASSERT_OK_AND_ASSIGN(const CalibrationRun run,
                                Run(sample, {.parts = kInformation}));
    const int64_t width = shape.num_kv_heads * shape.head_dim;
    for (const LayerCalibration& layer : run.calibration.layers) {
      ASSERT_EQ(layer.key_information.size(0), width);
      EXPECT_GT(layer.key_information.diagonal().min().item<double>(), 0.0);
      EXPECT_GT(layer.value_information.diagonal().min().item<double>(), 0.0);
      EXPECT_EQ(layer.sample_rows.size(1), 2 * width);
    }
  }
}

TEST_F(InformationTest, MoreLabelsPerPositionLowerTheErrorOfTheEstimate) {
  const CalibrationSample sample = DomainSample();
  auto information = [&](int64_t labels) {
    CalibrateOptions options{.parts = kInformation};
    options.parts.labels_per_position = labels;
    const absl::StatusOr<CalibrationRun> run = Run(sample, options);
    KVASIR_EXPECT_OK(run.status());
    return run->calibration.layers[1].value_information;
  };
  const at::Tensor many = information(160);
  const double one = RelativeError(information(1), many);
  const double sixteen = RelativeError(information(16), many);
  // The error falls with the square root of the number of labels, so 16
  // independent labels would give a quarter of the error of one label.
  EXPECT_LT(sixteen, 0.5 * one);
  EXPECT_GT(sixteen, 0.0);
}

TEST_F(InformationTest, MeasuringScoresAndInformationInOneRunChangesNeither) {
  const CalibrationSample sample = Sample(4, 12);
  KVASIR_ASSERT_OK_AND_ASSIGN(const CalibrationRun fisher, Run(sample, {}));
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const CalibrationRun both,
      Run(sample, {.parts = {.fisher = true, .information = true}}));
  KVASIR_ASSERT_OK_AND_ASSIGN(const CalibrationRun alone,
                              Run(sample, {.parts = kInformation}));
  EXPECT_NEAR(both.loss, fisher.loss, 1e-5);
  for (size_t l = 0; l < 3; ++l) {
    const LayerCalibration& layer = both.calibration.layers[l];
    EXPECT_TRUE(
        at::equal(layer.key_fisher, fisher.calibration.layers[l].key_fisher));
    EXPECT_TRUE(
        at::equal(layer.input_gram, fisher.calibration.layers[l].input_gram));
    EXPECT_TRUE(at::equal(layer.key_information,
                          alone.calibration.layers[l].key_information));
  }
}

TEST_F(InformationTest,
       NeitherTheNumberOfThreadsNorStoppingAndResumingChangesTheResult) {
  const CalibrationSample sample = DomainSample();
  CalibrateOptions options{.parts = kInformation};
  options.parts.labels_per_position = 2;
  auto bytes = [&](int threads, int64_t micro_batch) {
    options.threads = threads;
    options.micro_batch = micro_batch;
    options.cache = folder_ / absl::StrCat("cache", threads, "-", micro_batch);
    KVASIR_EXPECT_OK(Run(sample, options).status());
    return CacheBytes(options.cache);
  };
  const std::string want = bytes(1, 0);
  EXPECT_TRUE(want == bytes(3, 0));
  EXPECT_TRUE(want == bytes(2, 4));

  options = {.parts = options.parts, .cache = folder_ / "stopped"};
  stop_after_ = 4;
  int stops = 0;
  while (!Run(sample, options).ok()) {
    EXPECT_THAT(messages_, HasSubstr(stops > 0 ? "resuming where" : ""));
    ASSERT_LT(++stops, 20);
  }
  // The run stopped once for each sequence; sequences that were done did not
  // run again.
  EXPECT_EQ(stops, 9);
  EXPECT_TRUE(want == CacheBytes(options.cache));
}

TEST_F(InformationTest, FisherInformationAndSampleRowsAreReadBackFromTheCache) {
  const CalibrationSample sample = DomainSample();
  CalibrateOptions options{.parts = kInformation, .cache = folder_ / "cache"};
  KVASIR_ASSERT_OK_AND_ASSIGN(const CalibrationRun made, Run(sample, options));
  KVASIR_ASSERT_OK_AND_ASSIGN(const CalibrationRun again, Run(sample, options));
  EXPECT_TRUE(again.from_cache);
  for (size_t l = 0; l < 3; ++l) {
    const LayerCalibration& a = made.calibration.layers[l];
    const LayerCalibration& b = again.calibration.layers[l];
    EXPECT_TRUE(at::equal(a.key_information, b.key_information));
    EXPECT_TRUE(at::equal(a.value_information, b.value_information));
    EXPECT_TRUE(at::equal(a.sample_rows, b.sample_rows));
    EXPECT_TRUE(at::equal(a.sample_positions, b.sample_positions));
    EXPECT_TRUE(at::equal(a.sample_domains, b.sample_domains));
    EXPECT_TRUE(at::equal(a.sample_held_out, b.sample_held_out));
    ASSERT_EQ(b.domains.size(), 3U);
    EXPECT_EQ(b.domains[2].name, "c");
    EXPECT_EQ(b.domains[2].tokens, 16);
    EXPECT_TRUE(at::equal(a.domains[2].value_information,
                          b.domains[2].value_information));
  }
  // A request for fewer parts is served from the same cached result.
  options.parts = {.fisher = false};
  KVASIR_ASSERT_OK_AND_ASSIGN(const CalibrationRun less, Run(sample, options));
  EXPECT_TRUE(less.from_cache);
  EXPECT_FALSE(less.calibration.has_information());
  EXPECT_TRUE(less.calibration.layers[0].domains.empty());
  EXPECT_FALSE(less.calibration.layers[0].sample_rows.defined());
  // A request with other draws, rows or held-out sequences does not use the
  // cached result.
  options.parts = kInformation;
  options.parts.labels_per_position = 2;
  EXPECT_FALSE(Run(sample, options)->from_cache);
  options.parts = kInformation;
  options.parts.sample_rows = 9;
  EXPECT_FALSE(Run(sample, options)->from_cache);
  CalibrationSample other = sample;
  other.held_out_sequences = 0;
  EXPECT_FALSE(Run(other, {.parts = kInformation, .cache = folder_ / "cache"})
                   ->from_cache);
}

TEST_F(InformationTest, AMessageWarnsIfThereIsOnlyOneCalibrationDomain) {
  KVASIR_ASSERT_OK(Run(Sample(2, 10), {.parts = kInformation}).status());
  EXPECT_THAT(messages_,
              HasSubstr("warning: the calibration text has only one domain"));
  KVASIR_ASSERT_OK(Run(DomainSample(), {.parts = kInformation}).status());
  EXPECT_EQ(messages_, "");
}

TEST_F(InformationTest, ASampleThatHasOnlySinksOrHeldOutSequencesIsRefused) {
  CalibrationSample sample = Sample(2, 10);
  sample.sink_tokens = 10;
  EXPECT_THAT(
      Run(sample, {.parts = kInformation}),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("2 sequences that are not held out, each of 10")));
  sample = Sample(2, 10);
  sample.held_out_sequences = 2;
  EXPECT_THAT(
      Run(sample, {.parts = kInformation}),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("has no tokens to measure: it has 0 sequences")));
}

TEST_F(InformationTest, TheEstimatedCostCountsSampleRowsDomainsAndLabels) {
  const CalibrationSample sample = DomainSample();
  CalibrateOptions options{.parts = kInformation};
  const CalibrationCost one = CostOfCalibration(*checkpoint_, sample, options);
  // Each of three layers has Gram sums, a row for each sampled token, and
  // information matrices for keys and for values: one in float64, and one in
  // float32 for each of 3 domains.
  const int64_t gram = 8 * (24 * 24 + 24 + 4 * 6);
  const int64_t matrices = 2 * kWidth * kWidth * (8 + 3 * 4);
  EXPECT_EQ(one.sum_bytes, 3 * (gram + matrices + 72 * 2 * kWidth * 4));
  options.parts.labels_per_position = 3;
  const CalibrationCost three =
      CostOfCalibration(*checkpoint_, sample, options);
  EXPECT_GT(three.back_operations, 1.5 * one.back_operations);
  EXPECT_LT(three.back_operations, 3.0 * one.back_operations);
  EXPECT_EQ(three.forward_operations, one.forward_operations);
}

TEST(SampledLabelScoresTest, GradientsForDrawnLabelsEqualThoseOfAutograd) {
  // The head has more rows than SampledLabelScores reads at a time.
  const at::Tensor head =
      at::sin(at::arange(9000 * 8, at::kFloat)).view({9000, 8});
  const at::Tensor ids = at::tensor(std::vector<int64_t>{5, 8999, 17, 8500});
  const at::Tensor normal = at::cos(at::arange(32, at::kFloat)).view({4, 8});
  const auto uniform = [](int64_t row, int64_t draw) {
    if (draw == 1) return row == 0 ? 0.0 : 0x1.fffffffffffffp-1;
    return 0.23 * static_cast<double>(row) + 0.1;
  };
  const LabelScores have = SampledLabelScores(normal, head, ids, 2, uniform);
  ASSERT_EQ(have.gradients.size(), 2U);
  EXPECT_NEAR(have.loss, NextTokenLoss(normal, head, ids).loss, 1e-5);
  const at::Tensor cumulated =
      at::softmax(at::mm(normal, head.t()).to(at::kDouble), 1).cumsum(1);
  for (int64_t draw = 0; draw < 2; ++draw) {
    std::vector<int64_t> labels;
    for (int64_t row = 0; row < 4; ++row) {
      labels.push_back(std::min<int64_t>(
          (cumulated[row] <= uniform(row, draw)).sum().item<int64_t>(), 8999));
    }
    at::Tensor leaf = normal.clone().requires_grad_(true);
    at::nll_loss(at::log_softmax(at::mm(leaf, head.t()), 1), at::tensor(labels),
                 {}, at::Reduction::Sum)
        .neg()
        .backward();
    EXPECT_LT(
        RelativeError(have.gradients[static_cast<size_t>(draw)], leaf.grad()),
        1e-4)
        << draw;
  }
}

}  // namespace
}  // namespace kvasir::compress
