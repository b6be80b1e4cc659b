// Tests the executor on an emulated device instead of the CPU: which plans it
// serves, which copies a step makes, and whether its logits equal the CPU's.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "kernels/device/device_observer.h"
#include "kernels/emulation/emulated_device.h"
#include "kernels/op_table/op_table.h"
#include "model/checkpoint/checkpoint.h"
#include "model/shapes/shape_config.h"
#include "plan/presets.h"
#include "worker/collective/in_process_group.h"
#include "worker/offline/direct_runner.h"
#include "worker/testing/plan_cases.h"
#include "worker/testing/tiny_rank.h"
#include "worker/testing/weights_test_util.h"

namespace kvasir::worker {
namespace {

using base::StatusIs;
using kernels::DType;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Makes the rank run on an emulated device with these kernels.
void UseEmulated(DType activations, const kernels::DeviceOps& ops,
                 RankOptions* options) {
  options->make_device = [activations, ops](base::ThreadPool*,
                                            kernels::CpuBackend,
                                            int64_t limit_bytes) {
    kernels::emulation::EmulatedDeviceOptions device;
    device.memory_limit_bytes = limit_bytes;
    device.activations = activations;
    return std::make_unique<kernels::emulation::EmulatedDevice>(device, ops);
  };
}

// The smallest model shape that the GPU kernels accept.
model::ModelShape SmallShape() {
  return {.name = "small-test",
          .num_layers = 2,
          .hidden_size = 64,
          .intermediate_size = 96,
          .num_query_heads = 4,
          .num_kv_heads = 2,
          .head_dim = 32,
          .vocab_size = 517,
          .max_position = 128};
}

absl::StatusOr<kvasir::v1::KvPlan> PlanOfPreset(
    const std::string& name, const model::DecoderSpec& spec) {
  return plan::MakePresetPlan(name, model::AttentionShapeOf(spec));
}

RankOptions SmallOptions() {
  RankOptions options;
  options.page_tokens = 16;
  options.kv_cache_bytes = 4 << 20;
  options.executor.max_model_len = 128;
  options.executor.max_num_seqs = 4;
  options.executor.max_batched_tokens = 32;
  return options;
}

absl::StatusOr<std::unique_ptr<Rank>> MakeSmallRank(
    const RankOptions& options, const std::string& plan,
    Collective* collective = nullptr) {
  const model::ModelShape shape = SmallShape();
  KVASIR_ASSIGN_OR_RETURN(const model::DecoderSpec spec,
                          model::SpecOfShape(shape));
  KVASIR_ASSIGN_OR_RETURN(const kvasir::v1::KvPlan kv_plan,
                          PlanOfPreset(plan, spec));
  RandomSource source(shape, 20260, DType::kBf16);
  return Rank::Create(spec, kv_plan, &source, options, collective);
}

// Returns the ops that steps launch under the dense or the rotated plan.
std::vector<std::string> OpsOf(const std::string& plan) {
  std::vector<std::string> ops = {
      "copy_pages",      "count_tokens", "embedding", "gather_rows",
      "kv_append",       "log_softmax",  "matmul",    "norm",
      "paged_attention", "rope",         "sample",    "silu_mul"};
  if (plan == plan::kRotatedPreset) ops.push_back("hadamard");
  return ops;
}

// Ops are checked before weights are read, because reading may take minutes.
TEST(EmulatedRankTest, AnOpThatTheDeviceLacksIsReportedBeforeAnyWeightIsRead) {
  const kernels::DeviceOps all = kernels::emulated::Ops();
  for (const std::string plan : {plan::kDensePreset, plan::kRotatedPreset}) {
    for (const std::string& missing : OpsOf(plan)) {
      std::vector<kernels::DeviceOp> ops(all.ops, all.ops + all.count);
      std::erase_if(ops, [&](const auto& op) { return op.op == missing; });
      ASSERT_EQ(ops.size(), all.count - 1) << missing;
      RankOptions options = SmallOptions();
      UseEmulated(DType::kBf16, {ops.data(), ops.size()}, &options);
      bool packed = false;
      options.progress = [&packed](int64_t, int64_t) { packed = true; };
      EXPECT_THAT(
          MakeSmallRank(options, plan),
          StatusIs(absl::StatusCode::kUnimplemented,
                   absl::StrCat(missing, ": the device has no kernel for it")));
      EXPECT_FALSE(packed) << missing;
    }
  }
}

model::ModelShape SmallBiasedShape() {
  model::ModelShape shape = SmallShape();
  shape.family = model::Family::kQwen2;
  shape.qkv_bias = true;
  return shape;
}

kernels::DeviceOps OpsWithoutKeyBias(std::vector<kernels::DeviceOp>* ops) {
  const kernels::DeviceOps all = kernels::emulated::Ops();
  ops->assign(all.ops, all.ops + all.count);
  std::erase_if(*ops, [](const auto& op) { return op.op == "key_bias"; });
  EXPECT_EQ(ops->size(), all.count - 1);
  return {ops->data(), ops->size()};
}

// The plan is refused even if all key biases are zero and need no kernel,
// because that is known only after the weights are read.
TEST(EmulatedRankTest,
     AMissingKernelForKeyBiasesIsReportedBeforeWeightsAreRead) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const model::DecoderSpec spec,
                              model::SpecOfShape(SmallBiasedShape()));
  KVASIR_ASSERT_OK_AND_ASSIGN(const kvasir::v1::KvPlan plan,
                              PlanOfPreset(plan::kRotatedPreset, spec));
  std::vector<kernels::DeviceOp> ops;
  RankOptions options = SmallOptions();
  UseEmulated(DType::kBf16, OpsWithoutKeyBias(&ops), &options);
  bool packed = false;
  options.progress = [&packed](int64_t, int64_t) { packed = true; };
  RandomSource source(SmallBiasedShape(), 20260, DType::kBf16);
  EXPECT_THAT(Rank::Create(spec, plan, &source, options),
              StatusIs(absl::StatusCode::kUnimplemented,
                       "key_bias: the device has no kernel for it"));
  EXPECT_FALSE(packed);
}

TEST(EmulatedRankTest,
     TheCacheLeavesOutKeyMeansOnlyIfTheDeviceHasAKernelForKeyBiases) {
  std::vector<kernels::DeviceOp> ops;
  for (const bool has_kernel : {true, false}) {
    RankOptions options = SmallOptions();
    options.key_mean_tokens = {1, 2, 3, 4, 5, 6};
    UseEmulated(DType::kBf16,
                has_kernel ? kernels::emulated::Ops() : OpsWithoutKeyBias(&ops),
                &options);
    KVASIR_ASSERT_OK_AND_ASSIGN(
        const auto rank,
        MakeSmallRank(options, std::string(plan::kRotatedPreset)));
    EXPECT_EQ(rank->leaves_key_means_out(), has_kernel);
  }
}

// The products of a query and a key bias are above 65504, the largest number of
// float16.
TEST(EmulatedRankTest, LargeKeyBiasesAndMeansDoNotOverflowFloat16) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const model::DecoderSpec spec,
                              model::SpecOfShape(SmallBiasedShape()));
  KVASIR_ASSERT_OK_AND_ASSIGN(const kvasir::v1::KvPlan plan,
                              PlanOfPreset(plan::kRotatedPreset, spec));
  RandomSource random(SmallBiasedShape(), 20260, DType::kF32);
  ChangedSource source(
      &random, [](const std::string& name, const WeightBlock& block,
                  WeightSource::Consumer consume) {
        const bool is_query = name.ends_with("q_proj.bias");
        if (!is_query && !name.ends_with("k_proj.bias")) return consume(block);
        const std::vector<float> large(static_cast<size_t>(block.num_rows),
                                       is_query ? 300.0f : 1000.0f);
        WeightBlock other = block;
        other.data = large.data();
        return consume(other);
      });
  std::vector<int32_t> text(60);
  std::iota(text.begin(), text.end(), 3);
  for (const bool measures_means : {false, true}) {
    RankOptions options = SmallOptions();
    options.plan_check = {.token_ids = text, .time_limit = absl::Minutes(5)};
    if (measures_means) options.key_mean_tokens = text;
    UseEmulated(DType::kF16, kernels::emulated::Ops(), &options);
    KVASIR_ASSERT_OK_AND_ASSIGN(const auto rank,
                                Rank::Create(spec, plan, &source, options));
    EXPECT_THAT(rank->plan_checks().back().skipped, IsEmpty());
    EXPECT_TRUE(std::isfinite(rank->plan_checks().back().kl));
  }
}

TEST(EmulatedRankTest,
     TheOnlyPlanThatTheDeviceSupportsIsServedWithoutAComparison) {
  const model::ModelShape shape = SmallShape();
  KVASIR_ASSERT_OK_AND_ASSIGN(const model::DecoderSpec spec,
                              model::SpecOfShape(shape));
  const auto plan_of = [&](const char* name) {
    return *PlanOfPreset(name, spec);
  };
  const kernels::DeviceOps all = kernels::emulated::Ops();
  std::vector<kernels::DeviceOp> ops(all.ops, all.ops + all.count);
  std::erase_if(ops, [](const auto& op) { return op.op == "hadamard"; });
  RankOptions options = SmallOptions();
  UseEmulated(DType::kBf16, {ops.data(), ops.size()}, &options);
  // The remaining plan is not compared, because the time limit is zero.
  options.plan_check = {
      .token_ids = std::vector<int32_t>(100, 3),
      .time_limit = absl::ZeroDuration(),
      .instead = {*ServePlan(plan_of("dense-8bit"),
                             model::AttentionShapeOf(spec), {})}};
  RandomSource source(shape, 20260, DType::kBf16);
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const auto rank,
      Rank::Create(spec, plan_of(plan::kRotatedPreset), &source, options));
  EXPECT_EQ(rank->plan().source.method(), plan_of("dense-8bit").method());
  ASSERT_EQ(rank->plan_checks().size(), 2);
  EXPECT_THAT(rank->plan_checks()[0].skipped, HasSubstr("hadamard"));
  EXPECT_THAT(rank->plan_checks()[1].skipped, HasSubstr("it would take"));
}

TEST(EmulatedRankTest, ARankOfAGroupIsRefusedAtLoadIfTheDeviceLacksAllReduce) {
  RankOptions options = SmallOptions();
  UseEmulated(DType::kF32, kernels::emulated::Ops(), &options);
  const auto group = InProcessGroup::Create(2);
  EXPECT_THAT(MakeSmallRank(options, plan::kDensePreset, group[0].get()),
              StatusIs(absl::StatusCode::kUnimplemented,
                       "all_reduce_sum: the device has no kernel for it"));
}

TEST(EmulatedRankTest, TheNumericsIdContainsTheDeviceAndTheActivationType) {
  const auto numerics = [](std::optional<DType> activations) -> std::string {
    RankOptions options = SmallOptions();
    if (activations.has_value()) {
      UseEmulated(*activations, kernels::emulated::Ops(), &options);
    }
    auto rank = MakeSmallRank(options, plan::kDensePreset);
    KVASIR_EXPECT_OK(rank);
    return rank.ok() ? (*rank)->executor().numerics_id() : "";
  };
  EXPECT_EQ(numerics(std::nullopt), "cpu-f32-3");
  EXPECT_EQ(numerics(DType::kF32), "emulated-f32-3-fast");
  EXPECT_EQ(numerics(DType::kF16), "emulated-f16-3-fast");
  EXPECT_EQ(numerics(DType::kBf16), "emulated-bf16-3-fast");
}

TEST(EmulatedRankTest,
     TheRankReportsItsAttentionKernelsAndTheReasonForAPlainKernel) {
  const auto kernels_of = [](std::optional<DType> activations,
                             const std::string& plan) {
    RankOptions options = SmallOptions();
    if (activations.has_value()) {
      UseEmulated(*activations, kernels::emulated::Ops(), &options);
    }
    auto rank = MakeSmallRank(options, plan);
    KVASIR_EXPECT_OK(rank);
    std::vector<std::string> reported;
    if (!rank.ok()) return reported;
    for (const auto& [by, layers] : (*rank)->executor().attention_kernels()) {
      EXPECT_EQ(static_cast<size_t>(layers),
                (*rank)->executor().arenas().layers().size());
      reported.push_back(
          absl::StrCat(by.decode, "; ", by.prompts, "; ", by.why));
    }
    return reported;
  };
  using ::testing::ElementsAre;
  EXPECT_THAT(kernels_of(std::nullopt, plan::kDensePreset), ElementsAre());
  EXPECT_THAT(kernels_of(DType::kBf16, plan::kDensePreset),
              ElementsAre("attention; attention_prefill of 128 rows; "));
  EXPECT_THAT(kernels_of(DType::kF32, plan::kDensePreset),
              ElementsAre("attention_plain; attention_plain; "
                          "activations are float32"));
}

class CountedCopies final : public kernels::DeviceObserver {
 public:
  int uploads = 0;
  int read_backs = 0;
  int launches = 0;
  int allocations = 0;

 private:
  void OnUpload(size_t) override { ++uploads; }
  void OnReadBack(size_t) override { ++read_backs; }
  void OnLaunch(const kernels::OpLaunch&) override { ++launches; }
  void OnAllocate(size_t) override { ++allocations; }
};

TEST(EmulatedRankTest, AStepMakesOneUploadAndOneReadBack) {
  RankOptions options = SmallOptions();
  UseEmulated(DType::kBf16, kernels::emulated::Ops(), &options);
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto rank,
                              MakeSmallRank(options, plan::kRotatedPreset));
  DirectRunner runner(&rank->executor(), &rank->layout(), rank->pages());
  const std::vector<int32_t> prompt = {5, 1, 4, 516, 0, 7, 8, 3, 11};
  std::vector<int32_t> sampled;
  for (int step = 0; step < 4; ++step) {
    // In this step, the second sequence's prompt runs together with the first
    // sequence's output.
    std::vector<DirectStep> steps;
    if (step == 1) steps.push_back({.sequence_id = 2, .token_ids = prompt});
    steps.push_back({.sequence_id = 1,
                     .token_ids = step == 0 ? prompt : std::vector<int32_t>(),
                     .sample = GreedySample()});
    CountedCopies counted;
    {
      const kernels::ObserveDevice observe(&counted);
      KVASIR_ASSERT_OK_AND_ASSIGN(const auto result, runner.Run(steps));
      for (const auto& sequence : result.sequences()) {
        if (sequence.sequence_id() != 1) continue;
        sampled.push_back(sequence.token_id());
      }
    }
    EXPECT_EQ(counted.uploads, 1) << step;
    EXPECT_EQ(counted.read_backs, 1) << step;
    EXPECT_EQ(counted.allocations, 0) << step;
    EXPECT_GT(counted.launches, 20) << step;
  }
  EXPECT_THAT(
      sampled,
      AllOf(::testing::SizeIs(4),
            ::testing::Each(AllOf(::testing::Ge(0), ::testing::Lt(517)))));
}

// A sequence whose prompt runs in two chunks (or more, if evictions divide it),
// and then its output one token at a time, with the resulting logits.
struct Forced {
  std::vector<int32_t> prompt;
  // The tokens to use as output. If empty, the rank uses the tokens that it
  // samples.
  std::vector<int32_t> output;
  std::vector<std::vector<float>> logits;  // one row per position
};

// Runs the sequence `forced` on `rank`, whose logits tap must write
// to `forced`.
void Force(Rank& rank, Forced* forced) {
  constexpr int64_t kOutput = 4;
  DirectRunner runner(&rank.executor(), &rank.layout(), rank.pages());
  const bool chooses = forced->output.empty();
  const auto run = [&](absl::Span<const int32_t> ids, bool output) {
    KVASIR_ASSERT_OK_AND_ASSIGN(const auto result,
                                runner.Run({{.sequence_id = 1,
                                             .token_ids = ids,
                                             .sample = GreedySample(),
                                             .output = output}}));
    if (!chooses ||
        (!output && forced->logits.size() < forced->prompt.size())) {
      return;
    }
    forced->output.push_back(result.sequences(0).token_id());
  };
  const absl::Span<const int32_t> prompt(forced->prompt);
  constexpr size_t kFirst = 6;
  runner.SetPrompt(1, static_cast<int64_t>(prompt.size()));
  for (size_t done = 0; done < prompt.size();) {
    const size_t end =
        std::min(done < kFirst ? kFirst : prompt.size(),
                 static_cast<size_t>(runner.next_eviction(1).value_or(
                     static_cast<int64_t>(prompt.size()))));
    run(prompt.subspan(done, end - done), false);
    done = end;
  }
  for (size_t i = 0; i < kOutput; ++i) {
    const int32_t id = forced->output[i];
    run(absl::MakeConstSpan(&id, 1), true);
  }
}

void TapLogits(RankOptions* options, Forced* forced) {
  options->executor.logits_tap = [forced](const LogitsRow& row) {
    ASSERT_EQ(row.position, static_cast<int64_t>(forced->logits.size()));
    forced->logits.emplace_back(row.logits.begin(), row.logits.end());
  };
}

void Force(const std::string& plan_name, RankOptions options, Forced* forced) {
  auto checkpoint = model::Checkpoint::Open(
      absl::StrCat(std::getenv("KVASIR_SOURCE_DIR"), "/models/tiny"));
  KVASIR_ASSERT_OK(checkpoint);
  KVASIR_ASSERT_OK_AND_ASSIGN(const kvasir::v1::KvPlan plan,
                              PlanOfPreset(plan_name, checkpoint->spec()));
  TapLogits(&options, forced);
  CheckpointSource source(&*checkpoint);
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const auto rank,
      Rank::Create(checkpoint->spec(), plan, &source, options));
  Force(*rank, forced);
}

size_t Best(const std::vector<float>& logits) {
  return static_cast<size_t>(std::max_element(logits.begin(), logits.end()) -
                             logits.begin());
}

// Returns |have - want| / |want|.
double RelativeError(const std::vector<float>& have,
                     const std::vector<float>& want) {
  double error = 0;
  double norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double d = static_cast<double>(have[i]) - want[i];
    error += d * d;
    norm += static_cast<double>(want[i]) * want[i];
  }
  return std::sqrt(error / norm);
}

struct LogitsCase {
  std::string name;
  std::string plan;
  DType activations = DType::kF32;
  int32_t prompt_tokens = 20;
  double tolerance = 0;  // limit for |device - cpu| / |cpu| of each row
};

class EmulatedLogitsTest : public ::testing::TestWithParam<LogitsCase> {};

TEST_P(EmulatedLogitsTest, LogitsEqualThoseOfTheCpuWithinRounding) {
  RankOptions options = SmallOptions();
  options.kv_cache_bytes = 16 << 20;
  Forced cpu;
  for (int32_t i = 0; i < GetParam().prompt_tokens; ++i) {
    cpu.prompt.push_back((11 + 97 * i) % 4096);
  }
  Force(GetParam().plan, options, &cpu);
  ASSERT_EQ(cpu.logits.size(), cpu.prompt.size() + 4);
  Forced emulated{cpu.prompt, cpu.output, {}};
  UseEmulated(GetParam().activations, kernels::emulated::Ops(), &options);
  Force(GetParam().plan, options, &emulated);
  ASSERT_EQ(emulated.logits.size(), cpu.logits.size());
  double worst = 0;
  int close = 0;
  int other = 0;
  for (size_t row = 0; row < cpu.logits.size(); ++row) {
    const std::vector<float>& want = cpu.logits[row];
    const std::vector<float>& have = emulated.logits[row];
    worst = std::max(worst, RelativeError(have, want));
    const size_t best = Best(want);
    std::vector<float> rest = want;
    rest[best] = -INFINITY;
    if (want[best] - rest[Best(rest)] > 0.05f) {
      EXPECT_EQ(Best(have), best) << "row " << row;
    } else {
      ++close;
      other += Best(have) != best;
    }
  }
  RecordProperty("worst_relative_norm", absl::StrCat(worst));
  EXPECT_LE(worst, GetParam().tolerance)
      << close << " rows have close logits, of which " << other << " differ";
}

// With bfloat16, codes of few bits differ so much that only plans without codes
// are compared.
TEST(EmulatedRankTest, EveryPlanThatACpuServesGivesTheLogitsOfTheCpu) {
  std::vector<PlanCase> cases = PlanCases();
  for (PlanCase plan_case : PlanCases()) {
    // An eviction must keep all exact rows.
    if (plan_case.key_exact + plan_case.value_exact + plan_case.sinks > 0) {
      continue;
    }
    plan_case.name += "Evicting";
    plan_case.eviction = R"({"budget":8,"sinks":1,"recent":2,)"
                         R"("every_tokens":2,"lambda":1,)"
                         R"("positions":"ORIGINAL"})";
    cases.push_back(plan_case);
  }
  for (const PlanCase& plan_case : cases) {
    SCOPED_TRACE(plan_case.name);
    RankOptions options = TinyOptions();
    options.deterministic = true;  // a GPU does not lift prompts either
    const auto force = [&](Forced* forced) {
      TapLogits(&options, forced);
      KVASIR_ASSERT_OK_AND_ASSIGN(const auto rank,
                                  MakePlannedRank(plan_case, options));
      Force(*rank, forced);
    };
    Forced cpu = {{5, 1, 4, 9, 0, 7, 8, 3, 11, 20, 33}, {}, {}};
    force(&cpu);
    for (const DType activations : {DType::kF32, DType::kBf16}) {
      const bool rounds = activations != DType::kF32;
      if (rounds && !plan_case.eviction.empty()) continue;
      UseEmulated(activations, kernels::emulated::Ops(), &options);
      Forced emulated = {cpu.prompt, cpu.output, {}};
      force(&emulated);
      ASSERT_EQ(emulated.logits.size(), cpu.logits.size());
      if (rounds && plan_case.codes) continue;
      for (size_t row = 0; row < cpu.logits.size(); ++row) {
        EXPECT_LE(RelativeError(emulated.logits[row], cpu.logits[row]),
                  rounds            ? 0.05
                  : plan_case.codes ? 0.02
                                    : 1e-5)
            << "row " << row;
      }
    }
  }
}

// Uses float32, because in bfloat16 rounding could change the choice of
// an expert.
TEST(EmulatedExpertsTest, LogitsOfAModelWithExpertsEqualThoseOfTheCpu) {
  model::ModelShape shape = SmallShape();
  shape.family = model::Family::kMixtral;
  shape.intermediate_size = 40;
  shape.num_experts = 5;
  shape.experts_per_token = 2;
  KVASIR_ASSERT_OK_AND_ASSIGN(const model::DecoderSpec spec,
                              model::SpecOfShape(shape));
  KVASIR_ASSERT_OK_AND_ASSIGN(const kvasir::v1::KvPlan plan,
                              PlanOfPreset(plan::kDensePreset, spec));
  Forced results[2];
  std::vector<int64_t> loads[2];
  for (const bool emulated : {false, true}) {
    Forced& forced = results[emulated];
    forced.prompt = {5, 1, 4, 516, 0, 7, 8, 3, 11, 200, 33};
    if (emulated) forced.output = results[0].output;
    RankOptions options = SmallOptions();
    TapLogits(&options, &forced);
    if (emulated) UseEmulated(DType::kF32, kernels::emulated::Ops(), &options);
    RandomSource source(shape, 20260, DType::kBf16);
    KVASIR_ASSERT_OK_AND_ASSIGN(const auto rank,
                                Rank::Create(spec, plan, &source, options));
    Force(*rank, &forced);
    loads[emulated] = rank->executor().totals().expert_tokens;
  }
  ASSERT_EQ(results[1].logits.size(), results[0].logits.size());
  for (size_t row = 0; row < results[0].logits.size(); ++row) {
    EXPECT_LE(RelativeError(results[1].logits[row], results[0].logits[row]),
              1e-3)
        << "row " << row;
  }
  EXPECT_EQ(loads[1], loads[0]);
}

INSTANTIATE_TEST_SUITE_P(
    Plans, EmulatedLogitsTest,
    ::testing::Values(
        // The prompt is short, because the emulated device takes seconds for
        // each token in float32.
        LogitsCase{"DenseF32", plan::kDensePreset, DType::kF32, 8, 1e-3},
        LogitsCase{"EightBitsF16", "dense-8bit", DType::kF16, 20, 5e-3},
        // The plan keeps only recent tokens uncompressed. The prompt is longer
        // than that, so some of its tokens are compressed.
        LogitsCase{"RotatedBf16", plan::kRotatedPreset, DType::kBf16, 38,
                   2e-2}),
    [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace kvasir::worker
