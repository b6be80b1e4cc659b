// Runs whole models with GPU kernels and with the CPU engine on the same given
// text (teacher forcing), and compares logits, most likely tokens and loss. The
// emulated device runs a few tokens of the built-in models. A GPU runs hundreds
// of tokens of every model in KVASIR_GPU_MODELS (folders separated by colons).
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "kernels/emulation/testing/test_device.h"
#include "model/checkpoint/checkpoint.h"
#include "model/tokenizer/tokenizer.h"
#include "plan/eviction.h"
#include "plan/plan.h"
#include "plan/presets.h"
#include "worker/offline/direct_runner.h"
#include "worker/ranks/rank.h"
#include "worker/weights/weight_source.h"

namespace kvasir::worker {
namespace {

using kernels::emulation::OnGpu;

std::string SourceFolder() {
  const char* const folder = std::getenv("KVASIR_SOURCE_DIR");
  return folder != nullptr ? folder : ".";
}

// A model folder, and the cache plan to run it with.
struct Artifact {
  std::string folder;
  std::string plan;  // name of a preset; empty: the plan in the folder
  bool evicts =
      false;  // whether all but the first and latest slots are evicted
  std::string name() const {
    std::string name = folder.substr(folder.rfind('/') + 1);
    absl::StrAppend(&name, "_", plan.empty() ? "own" : plan,
                    evicts ? "_streaming" : "");
    std::replace_if(
        name.begin(), name.end(),
        [](char c) {
          return !absl::ascii_isalnum(static_cast<unsigned char>(c));
        },
        '_');
    return name;
  }
};

std::vector<Artifact> Artifacts() {
  const std::string models = SourceFolder() + "/models/";
  std::vector<std::string> folders = {models + "tiny", models + "tiny-palu"};
  if (const char* const more = std::getenv("KVASIR_GPU_MODELS")) {
    for (const absl::string_view folder :
         absl::StrSplit(more, ':', absl::SkipEmpty())) {
      folders.emplace_back(folder);
    }
  }
  std::vector<Artifact> artifacts;
  for (const std::string& folder : folders) {
    if (std::ifstream(folder + "/kv_plan.json").good()) {
      artifacts.push_back({folder, ""});
      continue;
    }
    for (const plan::PlanPreset& preset : plan::PlanPresets()) {
      if (!preset.any_checkpoint) continue;
      artifacts.push_back({folder, preset.name});
      artifacts.push_back({folder, preset.name, /*evicts=*/true});
    }
  }
  return artifacts;
}

// How many tokens to run. The prompt runs in two chunks, of which the first has
// `chunk` tokens; the output runs one token at a time.
struct Sizes {
  int64_t prompt = 0;
  int64_t chunk = 0;
  int64_t output = 0;
  uint32_t budget = 0;  // slots after an eviction
  double loss_tolerance = 0;
};

absl::StatusOr<kvasir::v1::KvPlan> PlanOf(const Artifact& artifact,
                                          const Sizes& sizes,
                                          const model::Checkpoint& checkpoint) {
  kvasir::v1::KvPlan plan;
  if (artifact.plan.empty()) {
    KVASIR_ASSIGN_OR_RETURN(
        plan, plan::ParsePlanJson(*checkpoint.kv_plan_json(), artifact.folder));
  } else {
    KVASIR_ASSIGN_OR_RETURN(
        plan, plan::MakePresetPlan(artifact.plan,
                                   model::AttentionShapeOf(checkpoint.spec())));
  }
  plan::ClampExactRows(checkpoint.spec().max_position_embeddings, &plan);
  if (artifact.evicts) {
    KVASIR_RETURN_IF_ERROR(
        plan::ApplyEviction({.method = plan::EvictionMethod::kStreaming,
                             .budget = {.tokens = sizes.budget},
                             .every_tokens = sizes.budget / 8},
                            model::AttentionShapeOf(checkpoint.spec()), &plan));
  }
  return plan;
}

Sizes SizesHere() {
  // The loss tolerance is larger here: with few tokens, the rounding of each
  // one matters.
  if (!kernels::emulation::TakesWholeSizes()) return {20, 13, 3, 16, 0.02};
  return {448, 256, 64, 256, 0.005};
}

absl::StatusOr<std::vector<int32_t>> TextOf(const std::string& folder,
                                            int64_t tokens) {
  KVASIR_ASSIGN_OR_RETURN(const auto tokenizer, model::Tokenizer::Load(folder));
  std::stringstream text;
  text << std::ifstream(SourceFolder() + "/models/tiny/evaluation.txt").rdbuf();
  KVASIR_ASSIGN_OR_RETURN(
      std::vector<int32_t> ids,
      tokenizer->Encode(text.str().substr(0, static_cast<size_t>(16 * tokens)),
                        {.add_special_tokens = true}));
  if (static_cast<int64_t>(ids.size()) < tokens) {
    return absl::FailedPreconditionError(absl::StrCat(
        folder, ": want ", tokens, " tokens of text, have ", ids.size()));
  }
  ids.resize(static_cast<size_t>(tokens));
  return ids;
}

using Logits = std::vector<float>;

// Runs the model on a given text and calls `receive` with the logits after each
// token.
absl::Status Force(
    const Artifact& artifact, const Sizes& sizes,
    absl::Span<const int32_t> text, RankOptions options,
    const std::function<void(size_t, absl::Span<const float>)>& receive) {
  KVASIR_ASSIGN_OR_RETURN(const auto checkpoint,
                          model::Checkpoint::Open(artifact.folder));
  KVASIR_ASSIGN_OR_RETURN(const kvasir::v1::KvPlan plan,
                          PlanOf(artifact, sizes, checkpoint));
  options.page_tokens = 16;
  options.kv_cache_bytes = int64_t{64} << 20;
  // A deterministic CPU rank does not lift the latents of prompts
  // (prompt_lift.h), just as a GPU never does.
  options.deterministic = true;
  options.executor.max_model_len = sizes.prompt + sizes.output + 16;
  options.executor.max_num_seqs = 1;
  options.executor.max_batched_tokens = sizes.chunk;
  size_t num_received = 0;
  options.executor.logits_tap = [&](const LogitsRow& row) {
    EXPECT_EQ(row.position, static_cast<int64_t>(num_received));
    receive(num_received++, row.logits);
  };
  CheckpointSource source(&checkpoint);
  KVASIR_ASSIGN_OR_RETURN(
      const auto rank, Rank::Create(checkpoint.spec(), plan, &source, options));
  DirectRunner runner(&rank->executor(), &rank->layout(), rank->pages());
  runner.SetPrompt(1, sizes.prompt);
  int64_t done = 0;
  while (done < static_cast<int64_t>(text.size())) {
    const bool output = done >= sizes.prompt;
    const int64_t end = runner.next_eviction(1).value_or(sizes.prompt);
    const int64_t count =
        output ? 1 : std::min({sizes.chunk, sizes.prompt - done, end - done});
    KVASIR_RETURN_IF_ERROR(
        runner
            .Run({{.sequence_id = 1,
                   .token_ids = text.subspan(static_cast<size_t>(done),
                                             static_cast<size_t>(count)),
                   .sample = GreedySample(),
                   .output = output}})
            .status());
    done += count;
  }
  EXPECT_EQ(num_received, text.size());
  EXPECT_EQ(runner.slots(1, 0).evicted_at > 0, artifact.evicts);
  return absl::OkStatus();
}

size_t Best(absl::Span<const float> logits) {
  return static_cast<size_t>(std::max_element(logits.begin(), logits.end()) -
                             logits.begin());
}

double LossOf(absl::Span<const float> logits, int32_t token) {
  const double most = logits[Best(logits)];
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - most);
  return std::log(sum) + most - logits[static_cast<size_t>(token)];
}

// Statistics of the differences between the logits of two devices.
struct Comparison {
  double cpu_loss = 0;
  double device_loss = 0;
  double worst_norm = 0;  // largest |device - cpu| / |cpu| of any row
  int64_t rows = 0;
  int64_t clear = 0;  // rows whose two largest logits differ by over 0.05
  int64_t clear_other = 0;
  int64_t close_other = 0;

  void Add(const Logits& cpu, absl::Span<const float> device) {
    double error = 0;
    double norm = 0;
    for (size_t i = 0; i < cpu.size(); ++i) {
      const double difference = static_cast<double>(device[i]) - cpu[i];
      error += difference * difference;
      norm += static_cast<double>(cpu[i]) * cpu[i];
    }
    worst_norm = std::max(worst_norm, std::sqrt(error / norm));
    const size_t best = Best(cpu);
    Logits rest = cpu;
    rest[best] = -INFINITY;
    const bool leads = cpu[best] - rest[Best(rest)] > 0.05f;
    const bool other = Best(device) != best;
    clear += leads;
    clear_other += leads && other;
    close_other += !leads && other;
    ++rows;
  }
};

class DeviceEngineTest : public ::testing::TestWithParam<Artifact> {};

TEST_P(DeviceEngineTest, LogitsOfATextOnTheDeviceAreCloseToThoseOnTheCpu) {
  const Artifact& artifact = GetParam();
  const Sizes sizes = SizesHere();
  // On the emulated device the text is shorter than the exact window of rotated
  // plans, so they would evict nothing.
  const std::string coded =
      artifact.evicts ? "dense-8bit" : plan::kRotatedPreset;
  if (!OnGpu() && !artifact.plan.empty() &&
      artifact.plan != plan::kDensePreset && artifact.plan != coded) {
    GTEST_SKIP() << "on the emulated device only two presets are tested";
  }
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const std::vector<int32_t> text,
      TextOf(artifact.folder, sizes.prompt + sizes.output));

  // The device runs before the CPU: if a GPU does not support one of the models
  // in KVASIR_GPU_MODELS, loading fails at once and the test is skipped.
  std::vector<Logits> device(text.size());
  RankOptions on_device;
  on_device.make_device = [](base::ThreadPool*, kernels::CpuBackend, int64_t) {
    return kernels::emulation::MakeTestDevice({});
  };
  const absl::Status ran =
      Force(artifact, sizes, text, on_device,
            [&](size_t row, absl::Span<const float> logits) {
              device[row].assign(logits.begin(), logits.end());
            });
  if (OnGpu() && absl::IsUnimplemented(ran) && !artifact.evicts) {
    GTEST_SKIP() << ran.message();
  }
  KVASIR_ASSERT_OK(ran);

  Comparison both;
  RankOptions on_cpu;
  on_cpu.num_threads = OnGpu() ? 8 : 1;
  KVASIR_ASSERT_OK(
      Force(artifact, sizes, text, on_cpu,
            [&](size_t row, absl::Span<const float> logits) {
              both.Add({logits.begin(), logits.end()}, device[row]);
              if (row + 1 == text.size()) return;
              both.cpu_loss += LossOf(logits, text[row + 1]);
              both.device_loss += LossOf(device[row], text[row + 1]);
            }));
  RecordProperty("loss_ratio", absl::StrCat(both.device_loss / both.cpu_loss));
  RecordProperty("worst_norm", absl::StrCat(both.worst_norm));
  std::printf("loss %.5f, the CPU's %.5f; worst row %.2e; %d of %d clear\n",
              both.device_loss / static_cast<double>(both.rows - 1),
              both.cpu_loss / static_cast<double>(both.rows - 1),
              both.worst_norm, static_cast<int>(both.clear),
              static_cast<int>(both.rows));
  EXPECT_NEAR(both.device_loss / both.cpu_loss, 1.0, sizes.loss_tolerance);
  EXPECT_EQ(both.clear_other, 0);
  EXPECT_LE(both.close_other, std::max<int64_t>(1, both.rows / 50));
  // A loose bound, which every model meets and which wrong kernels
  // would exceed.
  EXPECT_LE(both.worst_norm, 0.1);
}

INSTANTIATE_TEST_SUITE_P(Artifacts, DeviceEngineTest,
                         ::testing::ValuesIn(Artifacts()),
                         [](const auto& test) { return test.param.name(); });

}  // namespace
}  // namespace kvasir::worker
