#include "compress/calibrate/calibrate.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>

#include "base/status_matchers.h"
#include "compress/artifact/random_checkpoint.h"
#include "compress/calibrate/calibration_cost.h"
#include "compress/calibrate/head_loss.h"
#include "compress/oracle/reference_decoder.h"
#include "compress/runtime/cpu_setup.h"
#include "compress/testing/calibrate_fixture.h"

namespace kvasir::compress {
namespace {

using ::kvasir::base::StatusIs;
using ::testing::HasSubstr;

// Computes the sum over rows of x xT with plain loops.
at::Tensor NaiveGram(const at::Tensor& rows) {
  const int64_t width = rows.size(1);
  at::Tensor gram = at::zeros({width, width}, at::kDouble);
  auto out = gram.accessor<double, 2>();
  const auto x = rows.accessor<double, 2>();
  for (int64_t r = 0; r < rows.size(0); ++r) {
    for (int64_t i = 0; i < width; ++i) {
      for (int64_t j = 0; j < width; ++j) out[i][j] += x[r][i] * x[r][j];
    }
  }
  return gram;
}

TEST_F(CalibrateTest,
       GramMatricesSumsAndQueryEnergiesEqualANaiveFloat64Computation) {
  const CalibrationSample sample = Sample(5, 9);
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const CalibrationRun run,
      Run(sample, {.parts = {.fisher = false, .rotated_keys = true}}));
  const Calibration& calibration = run.calibration;
  EXPECT_EQ(calibration.num_tokens, 45);
  EXPECT_EQ(calibration.num_sequences, 5);
  EXPECT_FALSE(calibration.has_fisher());

  KVASIR_ASSERT_OK_AND_ASSIGN(
      const ReferenceDecoder decoder,
      ReferenceDecoder::Load(*checkpoint_, std::nullopt));
  Recorder recorder;
  for (const std::vector<int32_t>& sequence : sample.sequences) {
    KVASIR_ASSERT_OK(
        decoder.Logits(Ids(sequence), {.observer = &recorder}).status());
  }
  ASSERT_EQ(calibration.layers.size(), 3U);
  for (size_t l = 0; l < 3; ++l) {
    const LayerCalibration& layer = calibration.layers[l];
    const at::Tensor& x = recorder.inputs[l];
    EXPECT_LT(RelativeError(layer.input_gram, NaiveGram(x)), 1e-6) << l;
    EXPECT_LT(RelativeError(layer.input_sum, x.sum(0)), 1e-6) << l;
    const at::Tensor energy = recorder.queries[l].square().mean(0).view({4, 6});
    EXPECT_LT(RelativeError(layer.query_energy, energy), 1e-6) << l;
    const at::Tensor& key = recorder.rotated_keys[l];
    EXPECT_LT(RelativeError(layer.rotated_key_gram, NaiveGram(key)), 1e-6) << l;
    EXPECT_LT(RelativeError(layer.rotated_key_sum, key.sum(0)), 1e-6) << l;
  }
}

TEST(AddGramTest, AGramMatrixThatIsComputedInBlocksHasAllEntries) {
  const at::Tensor rows =
      at::sin(at::arange(3 * 1100, at::kFloat)).view({3, -1});
  at::Tensor gram = at::zeros({1100, 1100}, at::kDouble);
  AddGram(rows, 2, gram);
  const at::Tensor wide = rows.to(at::kDouble);
  const at::Tensor want = at::mm(wide.t(), wide);
  EXPECT_LT((at::triu(gram) - at::triu(want)).abs().max().item<double>(),
            1e-12);
}

// Computes the gradients of every layer's k_proj and v_proj by autograd over
// the whole model. The label of a position is the token `shift` positions
// later, so a shift of 1 gives the true next token.
struct WholeModelGradients {
  std::vector<at::Tensor> key, value;  // one tensor per layer
};
WholeModelGradients NaiveGradients(
    const model::Checkpoint& checkpoint,
    const std::vector<std::vector<int32_t>>& batch, int64_t shift) {
  ReferenceDecoder::Parts parts;
  parts.spec = checkpoint.spec();
  parts.outer = *LoadOuterTensors(checkpoint);
  std::vector<at::Tensor> leaves;
  for (int64_t l = 0; l < parts.spec.num_layers(); ++l) {
    TensorMap tensors = *LoadLayer(checkpoint, l);
    for (const char* name :
         {"self_attn.k_proj.weight", "self_attn.v_proj.weight"}) {
      leaves.push_back(tensors[name].requires_grad_(true));
    }
    parts.layers.push_back(std::move(tensors));
  }
  const ReferenceDecoder decoder =
      *ReferenceDecoder::FromTensors(std::move(parts));
  at::Tensor loss = at::zeros({});
  for (const std::vector<int32_t>& sequence : batch) {
    const at::Tensor ids = Ids(sequence);
    const int64_t count = ids.size(1) - shift;
    const at::Tensor logits = (*decoder.Logits(ids))[0].slice(0, 0, count);
    loss =
        loss + at::nll_loss(at::log_softmax(logits, 1), ids[0].slice(0, shift));
  }
  loss = loss / static_cast<double>(batch.size());
  const std::vector<at::Tensor> all = torch::autograd::grad({loss}, leaves);
  WholeModelGradients result;
  for (size_t i = 0; i < all.size(); i += 2) {
    result.key.push_back(all[i].to(at::kDouble));
    result.value.push_back(all[i + 1].to(at::kDouble));
  }
  return result;
}

struct NaiveFisher {
  std::vector<at::Tensor> key, value, key_root;
};
NaiveFisher MeanOfSquares(const model::Checkpoint& checkpoint,
                          const CalibrationSample& sample, int64_t shift) {
  std::vector<at::Tensor> key(3), value(3);
  for (const std::vector<int32_t>& sequence : sample.sequences) {
    const WholeModelGradients one =
        NaiveGradients(checkpoint, {sequence}, shift);
    for (size_t l = 0; l < 3; ++l) {
      const at::Tensor k = one.key[l].square();
      const at::Tensor v = one.value[l].square();
      key[l] = key[l].defined() ? key[l] + k : k;
      value[l] = value[l].defined() ? value[l] + v : v;
    }
  }
  NaiveFisher fisher;
  const auto count = static_cast<double>(sample.sequences.size());
  for (size_t l = 0; l < 3; ++l) {
    fisher.key.push_back((key[l] / count).sum(1));
    fisher.value.push_back((value[l] / count).sum(1));
    fisher.key_root.push_back((key[l] / count).sqrt().sum(1));
  }
  return fisher;
}

TEST_F(CalibrateTest, FisherScoresEqualThoseOfAutogradThroughTheWholeModel) {
  const CalibrationSample sample = Sample(4, 12);
  KVASIR_ASSERT_OK_AND_ASSIGN(const CalibrationRun run, Run(sample, {}));
  ASSERT_TRUE(run.calibration.has_fisher());
  const NaiveFisher naive = MeanOfSquares(*checkpoint_, sample, 1);
  for (size_t l = 0; l < 3; ++l) {
    const LayerCalibration& layer = run.calibration.layers[l];
    EXPECT_LT(RelativeError(layer.key_fisher, naive.key[l]), 1e-4) << l;
    EXPECT_LT(RelativeError(layer.value_fisher, naive.value[l]), 1e-4) << l;
    EXPECT_LT(RelativeError(layer.key_fisher_root, naive.key_root[l]), 1e-4)
        << l;
  }
}

TEST_F(CalibrateTest,
       FisherScoresSquareTheGradientOfEachSequenceBeforeAveraging) {
  const CalibrationSample sample = Sample(4, 12);
  KVASIR_ASSERT_OK_AND_ASSIGN(const CalibrationRun run, Run(sample, {}));
  const WholeModelGradients batch =
      NaiveGradients(*checkpoint_, sample.sequences, 1);
  for (size_t l = 0; l < 3; ++l) {
    EXPECT_GT(RelativeError(batch.key[l].square().sum(1),
                            run.calibration.layers[l].key_fisher),
              0.1);
  }
}

TEST_F(CalibrateTest, TheLabelOfAPositionIsTheNextToken) {
  const CalibrationSample sample = Sample(4, 12);
  KVASIR_ASSERT_OK_AND_ASSIGN(const CalibrationRun run, Run(sample, {}));
  const NaiveFisher twice = MeanOfSquares(*checkpoint_, sample, 2);
  for (size_t l = 0; l < 3; ++l) {
    EXPECT_GT(
        RelativeError(twice.value[l], run.calibration.layers[l].value_fisher),
        0.05);
  }
}

TEST(NextTokenLossTest, LossAndGradientEqualThoseOfAutograd) {
  // The head is bfloat16 and has more rows than NextTokenLoss reads at a time.
  const at::Tensor head = at::sin(at::arange(9000 * 8, at::kFloat))
                              .view({9000, 8})
                              .to(at::kBFloat16);
  const at::Tensor ids = at::tensor(std::vector<int64_t>{5, 8999, 17, 8500});
  at::Tensor normal =
      at::cos(at::arange(32, at::kFloat)).view({4, 8}).requires_grad_(true);
  const at::Tensor loss = at::nll_loss(
      at::log_softmax(at::mm(normal.slice(0, 0, 3), head.to(at::kFloat).t()),
                      1),
      ids.slice(0, 1));
  const at::Tensor gradient = torch::autograd::grad({loss}, {normal})[0];
  const HeadLoss have = NextTokenLoss(normal.detach(), head, ids);
  EXPECT_NEAR(have.loss, loss.item<double>(), 1e-5);
  EXPECT_LT(RelativeError(have.gradient, gradient), 1e-5);
  EXPECT_EQ(have.gradient[3].abs().max().item<double>(), 0.0);
}

TEST_F(CalibrateTest,
       ReadingTheModelLayerByLayerGivesTheSameResultAsHoldingItInMemory) {
  const CalibrationSample sample = Sample(3, 10);
  KVASIR_ASSERT_OK_AND_ASSIGN(const CalibrationRun resident, Run(sample, {}));
  KVASIR_ASSERT_OK_AND_ASSIGN(const CalibrationRun streaming,
                              Run(sample, {.parts = {.fisher = false}}));
  for (size_t l = 0; l < 3; ++l) {
    const LayerCalibration& a = resident.calibration.layers[l];
    const LayerCalibration& b = streaming.calibration.layers[l];
    EXPECT_TRUE(at::equal(a.input_gram, b.input_gram)) << l;
    EXPECT_TRUE(at::equal(a.query_energy, b.query_energy)) << l;
  }
  EXPECT_NE(resident.calibration.id, streaming.calibration.id);
}

TEST_F(CalibrateTest,
       TheNumberOfThreadsAndTheMicroBatchSizeDoNotChangeTheResult) {
  // The products are so wide that the BLAS would share them between threads.
  model::ModelShape shape = SmallShape();
  shape.num_layers = 2;
  shape.hidden_size = 256;
  shape.intermediate_size = 320;
  Write(shape);
  const CalibrationSample sample = Sample(5, 96);
  auto bytes = [&](int threads, int64_t micro_batch) {
    const std::filesystem::path cache =
        folder_ / absl::StrCat("cache", threads, "-", micro_batch);
    KVASIR_EXPECT_OK(
        Run(sample,
            {.threads = threads, .micro_batch = micro_batch, .cache = cache})
            .status());
    return CacheBytes(cache);
  };
  const std::string one = bytes(1, 0);
  EXPECT_TRUE(one == bytes(3, 0));
  EXPECT_TRUE(one == bytes(2, 5));
}

// If a micro-batch is one sequence, the threads share each matrix product, so
// the last bits of the result may differ.
TEST_F(CalibrateTest,
       MicroBatchesOfOneSequenceOnSeveralThreadsGiveTheSameResultUpToRounding) {
  model::ModelShape shape = SmallShape();
  shape.num_layers = 2;
  shape.hidden_size = 256;
  shape.intermediate_size = 320;
  Write(shape);
  const CalibrationSample sample = Sample(3, 96);
  KVASIR_ASSERT_OK_AND_ASSIGN(const CalibrationRun one,
                              Run(sample, {.threads = 1}));
  KVASIR_ASSERT_OK_AND_ASSIGN(const CalibrationRun shared,
                              Run(sample, {.threads = 3, .micro_batch = 1}));
  for (size_t l = 0; l < 2; ++l) {
    const LayerCalibration& want = one.calibration.layers[l];
    const LayerCalibration& have = shared.calibration.layers[l];
    EXPECT_LT(RelativeError(have.input_gram, want.input_gram), 1e-6) << l;
    EXPECT_LT(RelativeError(have.query_energy, want.query_energy), 1e-6) << l;
    EXPECT_LT(RelativeError(have.key_fisher, want.key_fisher), 1e-4) << l;
    EXPECT_LT(RelativeError(have.value_fisher, want.value_fisher), 1e-4) << l;
  }
}

TEST_F(CalibrateTest, TheNumberOfBlasThreadsIsRestoredAfterACalibration) {
  if (BlasThreads() == 0)
    GTEST_SKIP() << "this BLAS does not report its threads";
  const ScopedBlasThreads two(2);
  KVASIR_EXPECT_OK(Run(Sample(2, 10), {.threads = 2}).status());
  EXPECT_EQ(BlasThreads(), 2);
}

TEST_F(CalibrateTest, AResumedRunWritesTheSameBytesAsAnUninterruptedRun) {
  const CalibrationSample sample = Sample(4, 10);
  for (const bool fisher : {false, true}) {
    CalibrateOptions options;
    options.parts = {.fisher = fisher, .rotated_keys = true};
    options.cache = folder_ / absl::StrCat("whole", fisher);
    KVASIR_ASSERT_OK_AND_ASSIGN(const CalibrationRun whole,
                                Run(sample, options));
    const std::string want = CacheBytes(options.cache);

    options.cache = folder_ / absl::StrCat("stopped", fisher);
    stop_after_ = 4;
    int stops = 0;
    while (true) {
      const absl::StatusOr<CalibrationRun> run = Run(sample, options);
      if (run.ok()) {
        EXPECT_EQ(run->loss, whole.loss);
        break;
      }
      EXPECT_THAT(run.status(),
                  StatusIs(absl::StatusCode::kCancelled,
                           HasSubstr("the same command continues it")));
      ASSERT_LT(++stops, 20);
    }
    EXPECT_GE(stops, 2);
    EXPECT_THAT(messages_, HasSubstr("resuming where the last run"));
    EXPECT_TRUE(want == CacheBytes(options.cache)) << "fisher " << fisher;
    stop_after_.reset();
  }
}

TEST_F(CalibrateTest, ACalibrationInTheCacheIsUsedInsteadOfANewRun) {
  const CalibrationSample sample = Sample(3, 10);
  CalibrateOptions options;
  options.cache = folder_ / "cache";
  KVASIR_ASSERT_OK_AND_ASSIGN(const CalibrationRun first, Run(sample, options));
  EXPECT_FALSE(first.from_cache);
  KVASIR_ASSERT_OK_AND_ASSIGN(const CalibrationRun again, Run(sample, options));
  EXPECT_TRUE(again.from_cache);
  EXPECT_EQ(passes_, 0);
  EXPECT_EQ(again.calibration.id, first.calibration.id);
  EXPECT_EQ(again.calibration.num_tokens, 30);
  for (size_t l = 0; l < 3; ++l) {
    EXPECT_TRUE(at::equal(again.calibration.layers[l].input_gram,
                          first.calibration.layers[l].input_gram));
    EXPECT_TRUE(at::equal(again.calibration.layers[l].key_fisher,
                          first.calibration.layers[l].key_fisher));
  }
  // A cached calibration is also used if it has more parts than requested.
  options.parts.fisher = false;
  KVASIR_ASSERT_OK_AND_ASSIGN(const CalibrationRun less, Run(sample, options));
  EXPECT_TRUE(less.from_cache);
  // The result has only the requested parts, although the cached calibration
  // has more.
  EXPECT_FALSE(less.calibration.has_fisher());
  EXPECT_EQ(less.calibration.id, Id(sample, options.parts));
  EXPECT_NE(less.calibration.id, first.calibration.id);
}

TEST_F(CalibrateTest, DifferentTokensOrWeightsGiveADifferentCalibrationId) {
  CalibrateOptions options;
  options.parts.fisher = false;
  options.cache = folder_ / "cache";
  CalibrationSample sample = Sample(2, 10);
  KVASIR_ASSERT_OK(Run(sample, options).status());
  sample.sequences[1][3] = (sample.sequences[1][3] + 1) % 50;
  KVASIR_ASSERT_OK_AND_ASSIGN(const CalibrationRun other, Run(sample, options));
  EXPECT_FALSE(other.from_cache);
  PutLastNumber("model.layers.1.mlp.down_proj.weight", 0.125F);
  KVASIR_ASSERT_OK_AND_ASSIGN(const CalibrationRun model, Run(sample, options));
  EXPECT_FALSE(model.from_cache);
}

TEST_F(CalibrateTest, ADamagedCacheFileIsReplaced) {
  const CalibrationSample sample = Sample(2, 10);
  CalibrateOptions options;
  options.cache = folder_ / "cache";
  KVASIR_ASSERT_OK(Run(sample, options).status());
  const std::string want = CacheBytes(options.cache);
  const std::filesystem::path path =
      std::filesystem::directory_iterator(options.cache)->path();
  auto damage = [&](const std::string& bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
    KVASIR_ASSERT_OK_AND_ASSIGN(const CalibrationRun run, Run(sample, options));
    EXPECT_FALSE(run.from_cache);
    EXPECT_THAT(messages_, HasSubstr("is damaged"));
    EXPECT_TRUE(CacheBytes(options.cache) == want);
  };
  std::string flipped = want;
  flipped[want.size() / 2] = static_cast<char>(flipped[want.size() / 2] ^ 1);
  damage(flipped);
  damage(want.substr(0, want.size() - 100));
  damage("");
}

TEST_F(CalibrateTest,
       IfTheSavedStateIsDamagedTheCalibrationStartsFromTheBeginning) {
  const CalibrationSample sample = Sample(4, 10);
  CalibrateOptions options;
  options.cache = folder_ / "whole";
  KVASIR_ASSERT_OK(Run(sample, options).status());
  const std::string want = CacheBytes(options.cache);

  options.cache = folder_ / "cache";
  const std::filesystem::path path = CachePath(sample, options, ".state");
  stop_after_ = 4;
  ASSERT_FALSE(Run(sample, options).ok());
  stop_after_.reset();
  const std::string state = ReadFile(path);
  std::string flipped = state;
  flipped[state.size() / 2] = static_cast<char>(flipped[state.size() / 2] ^ 1);
  for (const std::string& bytes :
       {flipped, state.substr(0, state.size() / 2), std::string()}) {
    std::filesystem::remove_all(options.cache);
    std::filesystem::create_directories(options.cache);
    std::ofstream(path, std::ios::binary) << bytes;
    KVASIR_ASSERT_OK(Run(sample, options).status());
    EXPECT_THAT(messages_, HasSubstr("is damaged"));
    EXPECT_THAT(messages_,
                HasSubstr("the calibration starts from the beginning"));
    EXPECT_TRUE(want == CacheBytes(options.cache));
  }
}

TEST_F(CalibrateTest, AFailureToSaveTheStateDoesNotEndTheCalibration) {
  const CalibrationSample sample = Sample(3, 10);
  CalibrateOptions options;
  options.cache = folder_ / "cache";
  options.save_interval = absl::ZeroDuration();
  const std::filesystem::path state = CachePath(sample, options, ".state");
  // A folder with the name of the temporary file prevents the state from being
  // written.
  std::filesystem::create_directories(state.string() + ".partial");
  KVASIR_ASSERT_OK(Run(sample, options).status());
  EXPECT_THAT(messages_, HasSubstr("; calibration continues"));

  std::filesystem::remove(CachePath(sample, options, ".safetensors"));
  stop_after_ = 4;
  EXPECT_THAT(Run(sample, options), StatusIs(absl::StatusCode::kUnavailable,
                                             HasSubstr(".state.partial")));
}

TEST_F(CalibrateTest, TheStateIsKeptInTheCacheIfTheResultCannotBeSaved) {
  const CalibrationSample sample = Sample(3, 10);
  CalibrateOptions options;
  options.cache = folder_ / "cache";
  options.save_interval = absl::ZeroDuration();
  const std::filesystem::path result =
      CachePath(sample, options, ".safetensors");
  std::filesystem::create_directories(result.string() + ".partial");
  KVASIR_ASSERT_OK(Run(sample, options).status());
  EXPECT_THAT(messages_, HasSubstr("warning: "));
  EXPECT_TRUE(std::filesystem::exists(CachePath(sample, options, ".state")));
}

// Errors such as too many open files or a failing disk do not mean that the
// file is damaged.
TEST_F(CalibrateTest, ACacheFileThatCannotBeReadIsReportedAndNotReplaced) {
  const CalibrationSample sample = Sample(3, 10);
  CalibrateOptions options;
  options.cache = folder_ / "cache";
  std::filesystem::create_directories(options.cache);
  for (const char* ending : {".state", ".safetensors"}) {
    const std::filesystem::path path = CachePath(sample, options, ending);
    // A link that points to itself exists but cannot be read.
    std::filesystem::create_symlink(path.filename(), path);
    const absl::Status status = Run(sample, options).status();
    EXPECT_FALSE(status.ok());
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(path.filename().string()));
    EXPECT_EQ(passes_, 0);
    std::filesystem::remove(path);
  }
}

TEST_F(CalibrateTest, WeightsThatAreNotFiniteAreAnErrorThatNamesTheLayer) {
  // A NaN in layer 1 makes the input of layer 2 not finite.
  PutLastNumber("model.layers.1.mlp.down_proj.weight", std::nanf(""));
  EXPECT_THAT(
      Run(Sample(2, 10), {.parts = {.fisher = false}}),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("layer 2: the calibration sums are not finite")));
}

TEST_F(CalibrateTest, SequencesLongerThanTheContextAreRefused) {
  EXPECT_THAT(Run(Sample(1, 513), {}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("must have at most 512 tokens (the model's "
                                 "context), have 513")));
}

int64_t StatusKilobytes(const char* field) {
  std::ifstream in("/proc/self/status");
  std::string line;
  while (std::getline(in, line)) {
    if (line.rfind(field, 0) == 0) {
      return std::stoll(line.substr(std::strlen(field) + 1));
    }
  }
  return -1;
}

// Resets the peak memory (VmHWM) to the current memory (VmRSS) and returns it
// in kilobytes.
int64_t ResetPeak() {
  std::ofstream("/proc/self/clear_refs") << "5";
  return StatusKilobytes("VmHWM:");
}

constexpr CalibrationParts kWaysBack[] = {
    {.fisher = true}, {.fisher = false, .information = true}};

// If the autograd graphs of all layers were kept, they would hold the attention
// scores of 24 layers, which are more than the limits below.
TEST_F(CalibrateTest,
       TheEstimatedPeakMemoryIncludesTheWorkspaceOfOnlyOneLayer) {
  model::ModelShape shape = SmallShape();
  shape.num_layers = 24;
  shape.num_query_heads = 8;
  shape.hidden_size = 32;
  Write(shape);
  const CalibrationSample sample = Sample(2, 512);
  for (const CalibrationParts& parts : kWaysBack) {
    const CalibrateOptions options{.parts = parts, .threads = 1};
    // A first small run makes libtorch allocate what it needs only once, so
    // that it is not counted.
    KVASIR_ASSERT_OK(Run(Sample(1, 16), options).status());
    const int64_t before = ResetPeak();
    KVASIR_ASSERT_OK(Run(sample, options).status());
    const int64_t grown = (StatusKilobytes("VmHWM:") - before) * 1024;
    const CalibrationCost cost =
        CostOfCalibration(*checkpoint_, sample, options);
    // Bytes of one layer's attention scores.
    const int64_t scores = 8 * 512 * 512 * 4;
    EXPECT_LT(grown, 24 * scores / 2) << parts.fisher;
    // The estimated memory plus slack for the allocator: freed blocks may leave
    // gaps in which later blocks do not fit.
    EXPECT_LT(grown, cost.peak_bytes() + (int64_t{32} << 20)) << parts.fisher;
    EXPECT_GT(grown, 0) << parts.fisher;
  }
}

// In this model, logits and a large embedding take most of the memory. This
// test must run after the test of one layer's workspace, because it frees very
// large blocks. malloc then takes later large blocks from its heap, and gaps in
// the heap would raise the peak memory of the other test.
TEST_F(CalibrateTest, ThePeakMemoryWithALargeVocabularyIsAsEstimated) {
  model::ModelShape shape = SmallShape();
  shape.num_layers = 1;
  shape.vocab_size = 400'000;
  shape.tied_embedding = true;
  Write(shape);
  for (const CalibrationParts& parts :
       {CalibrationParts{.fisher = false}, kWaysBack[0], kWaysBack[1]}) {
    const CalibrateOptions options{.parts = parts};
    const CalibrationSample sample = Sample(1, 40);
    // A first small run makes libtorch allocate what it needs only once, so
    // that it is not counted.
    KVASIR_ASSERT_OK(Run(Sample(1, 2), options).status());
    const int64_t before = ResetPeak();
    KVASIR_ASSERT_OK(Run(sample, options).status());
    const int64_t grown = (StatusKilobytes("VmHWM:") - before) * 1024;
    const CalibrationCost cost =
        CostOfCalibration(*checkpoint_, sample, options);
    EXPECT_LT(grown, cost.peak_bytes() + (int64_t{16} << 20))
        << parts.fisher << parts.information;
    EXPECT_LT(cost.peak_bytes(),
              parts.has_gradients() ? int64_t{400} << 20 : 1 << 20);
  }
}

TEST_F(CalibrateTest, FisherScoresTakeMostOfTheEstimatedTime) {
  const CalibrationSample sample = Sample(2, 64);
  const CalibrationCost cost = CostOfCalibration(*checkpoint_, sample, {});
  const CalibrationTime time = TimeOfCalibration(cost, 1e9);
  EXPECT_GT(time.way_back, time.total / 2);
  EXPECT_LT(time.way_back, time.total);
  EXPECT_GT(MeasureOperationsPerSecond(1), 1e6);
}

}  // namespace
}  // namespace kvasir::compress
