#include "compress/train/recover.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "compress/artifact/random_checkpoint.h"
#include "compress/tensors/tensor_loader.h"
#include "compress/testing/folder_fixture.h"
#include "compress/train/recover_ranges.h"
#include "compress/train/recover_writer.h"
#include "model/shapes/attention_shape.h"
#include "plan/plan.h"

namespace kvasir::compress {
namespace {

using ::kvasir::base::StatusIs;
using ::testing::HasSubstr;

constexpr int64_t kLayers = 2;

model::DecoderSpec TinySpec() {
  model::DecoderSpec spec;
  spec.hidden_size = 16;
  spec.num_heads = 4;
  spec.num_kv_heads = 2;
  spec.head_dim = 8;
  spec.intermediate_size = 24;
  spec.vocab_size = 13;
  spec.max_position_embeddings = 64;
  spec.rope.rotary_dim = 8;
  spec.rope.frequencies = {1.0, 0.5, 0.2, 0.1};
  spec.tied_head = true;
  spec.layers.resize(kLayers);
  return spec;
}

constexpr char kPaluPlan[] = R"(
  {"schemaVersion": 1, "method": "palu", "layers": [%LAYER%, %LAYER%]})";
constexpr char kPaluLayer[] = R"({
  "key": {"parts": [{"lowRank": {"groups": [{"heads": [0, 1], "rank": 6}]},
    "uses": [{"reconstruct": {}}], "stored": "PRE_ROPE",
    "codec": {"dtype": "F32", "none": {}}}]},
  "value": {"parts": [{"lowRank": {"groups": [{"heads": [0], "rank": 4},
                                              {"heads": [1], "rank": 3}]},
    "uses": [{"fold": {}}], "stored": "NO_ROPE",
    "codec": {"dtype": "F32", "none": {}}}]}})";
constexpr char kPairsLayer[] = R"({
  "key": {"parts": [{"ropePairs": {"perHead": [{"pairIndices": [0, 2]},
                                               {"pairIndices": [1, 3]}]},
    "uses": [{"fold": {}}], "stored": "PRE_ROPE",
    "codec": {"dtype": "F32", "none": {}}}]},
  "value": {"parts": [{"full": {}, "stored": "NO_ROPE",
    "codec": {"dtype": "F32", "none": {}}}]}})";
constexpr char kStaticLayer[] = R"({
  "key": {"parts": [{"full": {}, "stored": "PRE_ROPE",
    "codec": {"bits": {"schedule": [4]}, "channelStatic": {}, "none": {}}}]},
  "value": {"parts": [{"full": {}, "stored": "NO_ROPE",
    "codec": {"dtype": "F32", "none": {}}}]}})";

kvasir::v1::KvPlan PlanOf(const std::string& layer) {
  std::string text = kPaluPlan;
  for (size_t at; (at = text.find("%LAYER%")) != std::string::npos;) {
    text.replace(at, 7, layer);
  }
  const auto plan = plan::ParsePlanJson(text, "test");
  KVASIR_EXPECT_OK(plan);
  return *plan;
}

std::vector<std::pair<std::string, std::optional<kvasir::v1::KvPlan>>>
Methods() {
  return {{"dense", std::nullopt},
          {"palu", PlanOf(kPaluLayer)},
          {"pairs", PlanOf(kPairsLayer)}};
}

// Makes a decoder with random weights. The weights outside attention are the
// same for every plan.
ReferenceDecoder MakeDecoder(const std::optional<kvasir::v1::KvPlan>& plan,
                             uint64_t attention_seed = 1) {
  ReferenceDecoder::Parts parts;
  parts.spec = TinySpec();
  parts.plan = plan;
  at::manual_seed(7);
  parts.outer.embedding =
      at::randn({parts.spec.vocab_size, parts.spec.hidden_size});
  parts.outer.final_norm = at::ones({parts.spec.hidden_size});
  parts.outer.head = parts.outer.embedding;
  for (int64_t l = 0; l < kLayers; ++l) {
    const auto program = MakeLayerProgram(
        parts.spec, plan ? &plan->layers(static_cast<int>(l)) : nullptr, l);
    KVASIR_EXPECT_OK(program);
    TensorMap& tensors = parts.layers.emplace_back();
    for (const bool attention : {false, true}) {
      if (attention) at::manual_seed(attention_seed + 10 * l);
      for (const model::RequiredTensor& want : LayerTensors(*program)) {
        if (absl::StartsWith(want.name, "self_attn.") != attention) continue;
        tensors[want.name] = want.shape.size() == 1
                                 ? at::ones(want.shape)
                                 : at::randn(want.shape) * 0.3;
      }
    }
  }
  auto decoder = ReferenceDecoder::FromTensors(std::move(parts));
  KVASIR_EXPECT_OK(decoder);
  return *std::move(decoder);
}

TokenStream SomeText(int64_t length) {
  TokenStream text;
  for (int64_t i = 0; i < length; ++i) {
    text.ids.push_back(static_cast<int32_t>((i * i + i / 7) % 13));
  }
  text.text_bytes = 2 * length;
  return text;
}

RecoverOptions FewSteps() {
  RecoverOptions options;
  options.steps = 30;
  options.batch_tokens = 64;
  options.micro_batch_tokens = 16;
  options.crop_tokens = 16;
  options.adapters.rank = 4;
  options.adapters.alpha = 8.0;
  options.learning_rate = 0.02;
  options.start_token = 0;
  options.threads = 2;
  return options;
}

bool GoOn(const RecoverProgress&) { return true; }

// Returns the decoder with some of its tensors replaced.
ReferenceDecoder WithTensors(const ReferenceDecoder& decoder,
                             const std::vector<TensorMap>& layers) {
  ReferenceDecoder::Parts parts{
      decoder.spec(), decoder.plan(), decoder.outer(), {}};
  for (int64_t l = 0; l < kLayers; ++l) {
    TensorMap tensors = decoder.layer(l);
    for (const auto& [name, tensor] : layers[static_cast<size_t>(l)]) {
      tensors.at(name) = tensor;
    }
    parts.layers.push_back(std::move(tensors));
  }
  auto made = ReferenceDecoder::FromTensors(std::move(parts));
  KVASIR_EXPECT_OK(made);
  return *std::move(made);
}

// Returns the decoder's mean loss on the first tokens of the text, with coded
// latents.
double Loss(const ReferenceDecoder& decoder, const TokenStream& text) {
  const int64_t length = decoder.spec().max_position_embeddings;
  const std::vector<int64_t> first(text.ids.begin(),
                                   text.ids.begin() + length + 1);
  const at::Tensor ids = at::tensor(first);
  const at::NoGradGuard no_grad;
  const auto logits = decoder.Logits(ids.slice(0, 0, length).unsqueeze(0));
  KVASIR_EXPECT_OK(logits);
  return at::nll_loss(at::log_softmax((*logits)[0], -1), ids.slice(0, 1))
      .item<double>();
}

// ---------------------------------------------------------------------- loss

TEST(RecoverLossTest, LossAndGradientEqualThoseOfTheFormula) {
  at::manual_seed(3);
  const at::Tensor normal = at::randn({9, 6}).requires_grad_(true);
  const Prediction teacher{at::randn({9, 6}), at::randn({50, 6})};
  const at::Tensor head = at::randn({50, 6});
  const at::Tensor targets = at::randint(50, {9}, at::kLong);
  const RecoverLossWeights weights{0.7, 1.3, 2.5};

  const at::Tensor logits = at::linear(normal, head);
  const at::Tensor entropy = at::nll_loss(at::log_softmax(logits, -1), targets,
                                          {}, at::Reduction::Sum);
  const double t = weights.temperature;
  const at::Tensor q =
      at::softmax(at::linear(teacher.normal, teacher.head) / t, -1);
  const at::Tensor divergence =
      (q * (q.log() - at::log_softmax(logits / t, -1))).sum();
  (weights.cross_entropy * entropy + weights.divergence * t * t * divergence)
      .backward();

  const RecoverLoss loss =
      ComputeRecoverLoss({normal.detach(), head}, teacher, targets, weights);
  EXPECT_NEAR(loss.cross_entropy, entropy.item<double>(), 1e-4);
  EXPECT_NEAR(loss.divergence, divergence.item<double>(), 1e-4);
  EXPECT_TRUE(at::allclose(loss.gradient, normal.grad(), 1e-4, 1e-5));
}

TEST(RecoverLossTest, TheLossOfManyRowsIsTheSumOverBlocksOfRows) {
  at::manual_seed(4);
  const int64_t rows = 2 * RecoverLossRows(20'000) + 5;
  const at::Tensor normal = at::randn({rows, 2});
  const at::Tensor head = at::randn({20'000, 2});
  const at::Tensor targets = at::randint(20'000, {rows}, at::kLong);
  const RecoverLoss loss =
      ComputeRecoverLoss({normal, head}, {normal, head}, targets, {});
  const at::Tensor chances = at::log_softmax(at::linear(normal, head), -1);
  EXPECT_NEAR(loss.cross_entropy,
              -chances.gather(1, targets.unsqueeze(1)).sum().item<double>(),
              1e-2);
  // Student and teacher are equal here, so their predictions do not diverge.
  EXPECT_NEAR(loss.divergence, 0.0, 1e-6);
}

// ------------------------------------------------------------------ adapters

TEST(AdapterSetTest, NewAdaptersChangeNothingBeforeTheFirstStep) {
  for (const auto& [method, plan] : Methods()) {
    const ReferenceDecoder decoder = MakeDecoder(plan);
    const AdapterSet adapters(decoder, {});
    for (int64_t l = 0; l < kLayers; ++l) {
      const TensorMap adapted = adapters.AdaptLayer(l, 0);
      ASSERT_EQ(adapted.size(), decoder.layer(l).size());
      for (const auto& [name, tensor] : adapted) {
        EXPECT_TRUE(tensor.equal(decoder.layer(l).at(name)))
            << method << " " << name;
      }
    }
  }
}

TEST(AdapterSetTest, EveryMethodAdaptsTheSameProjections) {
  const auto names = [](const std::optional<kvasir::v1::KvPlan>& plan) {
    return AdaptedWeights(MakeDecoder(plan).program(1));
  };
  EXPECT_THAT(names(std::nullopt),
              testing::ElementsAre(
                  "self_attn.q_proj.weight", "self_attn.k_proj.weight",
                  "self_attn.v_proj.weight", "self_attn.o_proj.weight"));
  EXPECT_THAT(names(PlanOf(kPaluLayer)),
              testing::ElementsAre(
                  "self_attn.q_proj.weight", "self_attn.k_proj.down.weight",
                  "self_attn.v_proj.down.weight", "self_attn.o_proj.weight"));
  EXPECT_EQ(names(PlanOf(kPairsLayer)), names(std::nullopt));
}

TEST(AdapterSetTest, DropoutKeepsTheMeanOfAnAdaptersInputs) {
  const ReferenceDecoder decoder = MakeDecoder(std::nullopt);
  const AdapterSet adapters(decoder, {.rank = 2, .alpha = 2.0, .dropout = 0.5});
  const std::string name = "self_attn.q_proj.weight";
  {
    const at::NoGradGuard no_grad;
    for (const at::Tensor& parameter : adapters.parameters()) {
      parameter.fill_(1.0);
    }
  }
  const auto added = [&](uint64_t draw) {
    return (adapters.AdaptLayer(0, draw).at(name) - decoder.layer(0).at(name))
        .detach();
  };
  // With a dropout of one half, each column of the added weight is either twice
  // the adapter's column or 0.
  const at::Tensor first = added(0);
  const at::Tensor columns = first[0].gt(2.0).to(at::kFloat) * 4.0;
  EXPECT_GT(columns.sum().item<double>(), 0.0);
  EXPECT_TRUE(at::allclose(first, columns.expand_as(first), 0.0, 1e-5));
  EXPECT_TRUE(first.equal(added(0)));
  at::Tensor sum = at::zeros_like(first);
  for (uint64_t draw = 0; draw < 400; ++draw) sum += added(draw);
  EXPECT_NEAR((sum / 400.0).mean().item<double>(), 2.0, 0.1);
  EXPECT_NEAR(adapters.MergeLayer(0).at(name).mean().item<double>(),
              decoder.layer(0).at(name).mean().item<double>() + 2.0, 1e-4);
}

// ------------------------------------------------------------------ training

TEST(RecoverTest, TrainingLowersTheLossWithEveryMethod) {
  const ReferenceDecoder teacher = MakeDecoder(std::nullopt, /*seed=*/99);
  for (const auto& [method, plan] : Methods()) {
    const ReferenceDecoder student = MakeDecoder(plan);
    const TokenStream text = SomeText(400);
    KVASIR_ASSERT_OK_AND_ASSIGN(
        const Recovered recovered,
        Recover(student, teacher, text, FewSteps(), GoOn));
    EXPECT_LT(recovered.last_loss, 0.8 * recovered.first_loss) << method;
    EXPECT_EQ(recovered.tokens_seen, 30 * 64);
    EXPECT_LT(Loss(WithTensors(student, recovered.layers), text),
              Loss(student, text))
        << method;
  }
}

TEST(RecoverTest,
     TrainingOnlyOnTheDivergenceBringsTheStudentCloserToTheTeacher) {
  const ReferenceDecoder teacher = MakeDecoder(std::nullopt, 99);
  RecoverOptions options = FewSteps();
  options.loss.cross_entropy = 0.0;
  std::vector<double> divergence;
  KVASIR_ASSERT_OK(Recover(MakeDecoder(PlanOf(kPaluLayer)), teacher,
                           SomeText(400), options,
                           [&](const RecoverProgress& progress) {
                             divergence.push_back(progress.divergence);
                             return true;
                           }));
  EXPECT_LT(divergence.back(), 0.5 * divergence.front());
}

TEST(RecoverTest, NamesShapesAndRanksOfTensorsDoNotChange) {
  const ReferenceDecoder student = MakeDecoder(PlanOf(kPaluLayer));
  KVASIR_ASSERT_OK_AND_ASSIGN(const Recovered recovered,
                              Recover(student, MakeDecoder(std::nullopt, 99),
                                      SomeText(400), FewSteps(), GoOn));
  for (int64_t l = 0; l < kLayers; ++l) {
    const TensorMap& trained = recovered.layers[static_cast<size_t>(l)];
    EXPECT_EQ(trained.size(), 4u);
    for (const auto& [name, tensor] : trained) {
      EXPECT_EQ(tensor.sizes(), student.layer(l).at(name).sizes()) << name;
      EXPECT_FALSE(tensor.equal(student.layer(l).at(name))) << name;
    }
    const at::Tensor key =
        at::mm(student.layer(l).at("self_attn.k_proj.up.0.weight"),
               trained.at("self_attn.k_proj.down.weight"));
    EXPECT_EQ(at::linalg_matrix_rank(key, 1e-5).item<int64_t>(), 6);
  }
}

TEST(RecoverTest, TheSeedDeterminesTheTrainedWeights) {
  const ReferenceDecoder teacher = MakeDecoder(std::nullopt, 99);
  const ReferenceDecoder student = MakeDecoder(PlanOf(kPaluLayer));
  const auto trained = [&](uint64_t seed) {
    RecoverOptions options = FewSteps();
    options.steps = 3;
    options.adapters.seed = seed;
    const auto result = Recover(student, teacher, SomeText(400), options, GoOn);
    KVASIR_EXPECT_OK(result);
    return result->layers[1].at("self_attn.o_proj.weight");
  };
  const at::Tensor first = trained(1);
  EXPECT_TRUE(first.equal(trained(1)));
  EXPECT_FALSE(first.equal(trained(2)));
}

TEST(RecoverTest, WithZeroTrainingStepsTheWeightsDoNotChange) {
  const ReferenceDecoder student = MakeDecoder(PlanOf(kPairsLayer));
  RecoverOptions options = FewSteps();
  options.steps = 0;
  KVASIR_ASSERT_OK_AND_ASSIGN(const Recovered recovered,
                              Recover(student, MakeDecoder(std::nullopt),
                                      SomeText(400), options, GoOn));
  for (int64_t l = 0; l < kLayers; ++l) {
    for (const auto& [name, tensor] :
         recovered.layers[static_cast<size_t>(l)]) {
      EXPECT_TRUE(tensor.equal(student.layer(l).at(name))) << name;
    }
  }
}

TEST(RecoverTest, TrainingThroughCodesLowersTheLoss) {
  std::string layer = kPaluLayer;
  const std::string dtype = R"("codec": {"dtype": "F32", "none": {}})";
  layer.replace(layer.find(dtype), dtype.size(),
                R"("codec": {"bits": {"schedule": [2]}, "perToken": {},
                    "paramDtype": "F16", "none": {}})");
  const ReferenceDecoder student = MakeDecoder(PlanOf(layer));
  const ReferenceDecoder teacher = MakeDecoder(std::nullopt, 99);
  RecoverOptions options = FewSteps();
  const auto last_loss = [&](bool through_codes) {
    options.through_codes = through_codes;
    const auto recovered =
        Recover(student, teacher, SomeText(400), options, GoOn);
    KVASIR_EXPECT_OK(recovered);
    return Loss(WithTensors(student, recovered->layers), SomeText(400));
  };
  EXPECT_NE(last_loss(true), last_loss(false));
  EXPECT_LT(last_loss(true), Loss(student, SomeText(400)));
}

TEST(RecoverTest, AStoppedTrainingIsReported) {
  EXPECT_THAT(Recover(MakeDecoder(std::nullopt), MakeDecoder(std::nullopt, 99),
                      SomeText(400), FewSteps(),
                      [](const RecoverProgress& progress) {
                        return progress.step < 2;
                      }),
              StatusIs(absl::StatusCode::kCancelled,
                       HasSubstr("stopped after step 2")));
}

TEST(RecoverTest, ATrainingWhoseLossIsNotFiniteIsAnError) {
  RecoverOptions options = FewSteps();
  options.learning_rate = 1e30;
  EXPECT_THAT(Recover(MakeDecoder(std::nullopt), MakeDecoder(std::nullopt, 99),
                      SomeText(400), options, GoOn),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("a lower --lr")));
}

TEST(RecoverTest, InvalidRequestsAreRefused) {
  const ReferenceDecoder decoder = MakeDecoder(std::nullopt);
  EXPECT_THAT(
      Recover(decoder, decoder, SomeText(16), FewSteps(), GoOn),
      StatusIs(
          absl::StatusCode::kInvalidArgument,
          HasSubstr("16 tokens, but crops of 16 tokens need at least 17")));
  TokenStream foreign = SomeText(400);
  foreign.ids[77] = 13;
  EXPECT_THAT(Recover(decoder, decoder, foreign, FewSteps(), GoOn),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("token 77 of the text has the id 13")));
  RecoverOptions options = FewSteps();
  options.loss = {.cross_entropy = 0.0, .divergence = 0.0};
  EXPECT_THAT(Recover(decoder, decoder, SomeText(400), options, GoOn),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("the weight of the cross entropy")));
  options = FewSteps();
  options.crop_tokens = 65;
  EXPECT_THAT(Recover(decoder, decoder, SomeText(400), options, GoOn),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("crops must have 2 to 64 tokens")));
  model::DecoderSpec other = TinySpec();
  other.vocab_size = 14;
  EXPECT_THAT(CheckTeacher(TinySpec(), other),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("size is 14 in the teacher, but 13 in the")));
}

// ------------------------------------------------------------------- folders

class RecoverWriterTest : public FolderTest {
 protected:
  void SetUp() override {
    RandomCheckpointOptions options;
    options.shape = {.name = "test",
                     .num_layers = kLayers,
                     .hidden_size = 16,
                     .intermediate_size = 24,
                     .num_query_heads = 4,
                     .num_kv_heads = 2,
                     .head_dim = 8,
                     .vocab_size = 13,
                     .max_position = 64,
                     .rope_theta = 100.0,
                     .bos_token_id = 0,
                     .eos_token_id = 1};
    options.max_shard_bytes = 2000;
    options.out = folder_ / "base";
    KVASIR_ASSERT_OK(
        WriteRandomCheckpoint(options, [](const auto&) { return true; }));
    const auto opened = model::Checkpoint::Open(options.out.string());
    KVASIR_ASSERT_OK(opened);
    std::ofstream(options.out / "kv_plan.json")
        << plan::PlanToJson(plan::FullRankPlan(
               model::AttentionShapeOf(opened->spec()), kvasir::v1::BF16));
  }

  // Returns the content of a folder's files, by name.
  static std::map<std::string, std::string> Files(
      const std::filesystem::path& folder) {
    std::map<std::string, std::string> files;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      files[entry.path().filename().string()] = ReadFile(entry.path());
    }
    return files;
  }

  std::vector<TensorMap> RecoverSteps(const model::Checkpoint& base,
                                      int64_t steps) const {
    const auto decoder = ReferenceDecoder::Load(base, std::nullopt);
    KVASIR_EXPECT_OK(decoder);
    RecoverOptions options = FewSteps();
    options.steps = steps;
    auto recovered = Recover(*decoder, *decoder, SomeText(400), options, GoOn);
    KVASIR_EXPECT_OK(recovered);
    KVASIR_EXPECT_OK(RoundToStored(base, recovered->layers));
    return recovered->layers;
  }
};

TEST_F(RecoverWriterTest, WithZeroTrainingStepsEveryFileEqualsItsSource) {
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const model::Checkpoint base,
      model::Checkpoint::Open((folder_ / "base").string()));
  KVASIR_ASSERT_OK(WriteRecovered(base, RecoverSteps(base, 0), folder_ / "out",
                                  /*overwrite=*/false));
  // The checkpoint has several shards.
  EXPECT_GT(Files(folder_ / "base").size(), 5u);
  EXPECT_EQ(Files(folder_ / "out"), Files(folder_ / "base"));
}

TEST_F(RecoverWriterTest, OnlyTheTrainedWeightsDifferFromTheSource) {
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const model::Checkpoint base,
      model::Checkpoint::Open((folder_ / "base").string()));
  const std::vector<TensorMap> trained = RecoverSteps(base, 3);
  KVASIR_ASSERT_OK(WriteRecovered(base, trained, folder_ / "out", false));
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const model::Checkpoint out,
      model::Checkpoint::Open((folder_ / "out").string()));
  EXPECT_EQ(out.kv_plan_json(), base.kv_plan_json());
  ASSERT_EQ(out.tensors().entries().size(), base.tensors().entries().size());
  for (const auto& [name, entry] : base.tensors().entries()) {
    KVASIR_ASSERT_OK_AND_ASSIGN(const at::Tensor before,
                                LoadTensor(base, name));
    KVASIR_ASSERT_OK_AND_ASSIGN(const at::Tensor after, LoadTensor(out, name));
    EXPECT_EQ(before.equal(after), !absl::StrContains(name, ".self_attn."))
        << name;
  }
  // The tensors that were written must equal those in memory.
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const at::Tensor query,
      LoadTensor(out, "model.layers.1.self_attn.q_proj.weight"));
  EXPECT_TRUE(query.equal(trained[1].at("self_attn.q_proj.weight")));
}

TEST_F(RecoverWriterTest,
       ARefusedWriteLeavesNoOutputFolderAndNoTemporaryFolder) {
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const model::Checkpoint base,
      model::Checkpoint::Open((folder_ / "base").string()));
  std::filesystem::create_directories(folder_ / "notes");
  std::ofstream(folder_ / "notes" / "a") << "b";
  EXPECT_THAT(WriteRecovered(base, {}, folder_ / "notes", true),
              StatusIs(absl::StatusCode::kAlreadyExists,
                       HasSubstr("is not a checkpoint")));
  std::vector<TensorMap> wrong(1);
  wrong[0]["self_attn.q_proj.weight"] = at::zeros({3, 16});
  EXPECT_THAT(
      WriteRecovered(base, wrong, folder_ / "out", false),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr(
                   "q_proj.weight must have the shape [32, 16], has [3, 16]")));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "out"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "out.partial"));
}

TEST_F(RecoverWriterTest, StaticRangesAreFittedAgainToTheTrainedWeights) {
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const model::Checkpoint base,
      model::Checkpoint::Open((folder_ / "base").string()));
  const kvasir::v1::KvPlan plan = PlanOf(kStaticLayer);
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const CalibrationSample sample,
      SampleCalibration(SomeText(400), {.tokens = 128, .sequence_tokens = 32},
                        13));
  const auto ranges = [&](double times) {
    std::vector<TensorMap> layers(kLayers);
    for (int64_t l = 0; l < kLayers; ++l) {
      const auto weight = LoadTensor(
          base, model::LayerTensorName(l, "self_attn.k_proj.weight"));
      KVASIR_EXPECT_OK(weight);
      layers[static_cast<size_t>(l)]["self_attn.k_proj.weight"] =
          *weight * times;
    }
    KVASIR_EXPECT_OK(RenewRanges(base, plan, sample, 1, layers));
    return layers[0].at("self_attn.k_proj.range.scale");
  };
  const at::Tensor scale = ranges(1.0);
  EXPECT_EQ(scale.sizes(), at::IntArrayRef({16}));
  EXPECT_TRUE(at::allclose(ranges(2.0), 2.0 * scale));
}

TEST_F(RecoverWriterTest, ANumberThatTheStoredTypeCannotHoldIsRefused) {
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const model::Checkpoint base,
      model::Checkpoint::Open((folder_ / "base").string()));
  std::vector<TensorMap> layers(1);
  layers[0]["self_attn.q_proj.weight"] = at::full({32, 16}, 3.4e38);
  EXPECT_THAT(RoundToStored(base, layers),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("q_proj.weight: a trained weight")));
}

}  // namespace
}  // namespace kvasir::compress
