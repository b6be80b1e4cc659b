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
#include <iterator>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "kernels/device/read_back.h"
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
  std::optional<plan::EvictionMethod> eviction = std::nullopt;
  // Whether attention decides which slots are evicted.
  bool scored() const {
    return eviction && *eviction != plan::EvictionMethod::kStreaming;
  }
  std::string name() const {
    std::string name = folder.substr(folder.rfind('/') + 1);
    absl::StrAppend(&name, "_", plan.empty() ? "own" : plan,
                    !eviction ? ""
                    : *eviction == plan::EvictionMethod::kStreaming
                        ? "_streaming"
                    : *eviction == plan::EvictionMethod::kH2o ? "_h2o"
                                                              : "_q_hitter");
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
      for (const auto method :
           {plan::EvictionMethod::kStreaming, plan::EvictionMethod::kH2o,
            plan::EvictionMethod::kQHitter}) {
        artifacts.push_back({folder, preset.name, method});
      }
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
  if (artifact.eviction) {
    KVASIR_RETURN_IF_ERROR(
        plan::ApplyEviction({.method = *artifact.eviction,
                             .budget = {.tokens = sizes.budget},
                             .lambda = 0.5,
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

// The numbers that a unit of eviction stores for a slot.
struct Slot {
  uint32_t position = 0;
  float mass = 0.0f;
  float errors[kernels::kErrorSides] = {};
};
using UnitSlots = std::vector<Slot>;
using LayerSlots = std::vector<UnitSlots>;  // by unit of eviction

// Returns the slots of a sequence of `length` tokens in all layers, which are
// empty for layers that evict nothing.
absl::StatusOr<std::vector<LayerSlots>> ReadSlots(Rank& rank,
                                                  const DirectRunner& runner,
                                                  int64_t length) {
  std::vector<LayerSlots> slots;
  const auto stream = rank.device().MakeStream();
  for (const KvArenas::Layer& layer : rank.executor().arenas().layers()) {
    const kernels::SlotMetadata& on_device = layer.metadata;
    LayerSlots& of_layer =
        slots.emplace_back(static_cast<size_t>(on_device.num_units));
    if (on_device.num_units == 0) continue;
    // Has one page, and its planes at the same places as on the device.
    std::vector<char> page(static_cast<size_t>(on_device.page_bytes));
    kernels::SlotMetadataArgs metadata;
    metadata.arena = page.data();
    metadata.num_units = on_device.num_units;
    metadata.page_tokens = on_device.page_tokens;
    metadata.page_bytes = on_device.page_bytes;
    metadata.scores_offset = on_device.scores_offset;
    metadata.positions_offset = on_device.positions_offset;
    std::copy_n(on_device.error_offset, kernels::kErrorSides,
                metadata.error_offset);
    const DirectRunner::Slots there = runner.slots(1, layer.page_group);
    const int64_t count = there.kept_slots + length - there.evicted_at;
    for (int64_t s = 0; s < count; ++s) {
      const int64_t at = s % on_device.page_tokens;
      if (at == 0) {
        const int64_t index =
            there.pages[static_cast<size_t>(s / on_device.page_tokens)];
        KVASIR_RETURN_IF_ERROR(kernels::ReadBack(
            *stream, page.data(),
            kernels::OffsetBytes(on_device.arena, index * on_device.page_bytes),
            page.size()));
      }
      for (int64_t u = 0; u < on_device.num_units; ++u) {
        Slot slot = {.position = kernels::PositionsOf(metadata, 0, u)[at],
                     .mass = kernels::ScoresOf(metadata, 0, u)[at]};
        for (int side = 0; side < kernels::kErrorSides; ++side) {
          const uint8_t* const errors = kernels::ErrorsOf(metadata, side, 0, u);
          if (errors == nullptr) continue;
          slot.errors[side] = kernels::DecodeError(errors[at]);
        }
        of_layer[static_cast<size_t>(u)].push_back(slot);
      }
    }
  }
  return slots;
}

// Returns the positions of the slots that a unit must keep, by the definition
// in evict_select.h.
std::vector<uint32_t> Choice(const plan::ResolvedEviction& rule,
                             const UnitSlots& slots, int64_t kept) {
  const int64_t recent = rule.scored ? rule.recent : kept - rule.sinks;
  const auto candidates = absl::MakeSpan(slots).subspan(
      static_cast<size_t>(rule.sinks),
      slots.size() - static_cast<size_t>(rule.sinks + recent));
  // Returns norm(x) of all candidates.
  const auto norms = [&](const auto& number_of) {
    std::vector<float> numbers;
    for (const Slot& slot : candidates) numbers.push_back(number_of(slot));
    if (numbers.empty()) return numbers;
    const auto [least, greatest] =
        std::minmax_element(numbers.begin(), numbers.end());
    const float from = *least;
    const float range = *greatest - *least;
    for (float& x : numbers) x = range > 0.0f ? (x - from) / range : 0.0f;
    return numbers;
  };
  const auto mass = norms([](const Slot& slot) { return slot.mass; });
  const auto key = norms([](const Slot& slot) { return slot.errors[0]; });
  const auto value = norms([](const Slot& slot) { return slot.errors[1]; });
  std::vector<std::pair<float, size_t>> best;  // minus worth, candidate
  for (size_t i = 0; i < candidates.size(); ++i) {
    const float f = rule.friendliness * ((1.0f - key[i]) + (1.0f - value[i]));
    best.emplace_back(-(rule.lambda * mass[i] + (1.0f - rule.lambda) * f), i);
  }
  std::sort(best.begin(), best.end());
  best.resize(static_cast<size_t>(kept - rule.sinks - recent));
  std::vector<uint32_t> positions;
  for (const auto& [worth, i] : best) {
    positions.push_back(candidates[i].position);
  }
  for (size_t s = 0; s < slots.size(); ++s) {
    const auto slot = static_cast<int64_t>(s);
    if (slot < rule.sinks ||
        slot >= static_cast<int64_t>(slots.size()) - recent) {
      positions.push_back(slots[s].position);
    }
  }
  std::sort(positions.begin(), positions.end());
  return positions;
}

// The layer, the unit of eviction and the position of slots.
using Kept = std::set<std::tuple<size_t, size_t, uint32_t>>;

// Returns the slots that a sequence's last eviction kept, and expects them to
// be the Choice from the slots `before` the eviction.
Kept KeptSlots(const Rank& rank, const DirectRunner& runner,
               const std::vector<LayerSlots>& before,
               const std::vector<LayerSlots>& after) {
  Kept kept;
  for (size_t l = 0; l < after.size(); ++l) {
    const plan::ResolvedLayer& layer = rank.plan().layers[l];
    const int64_t count = runner.slots(1, layer.page_group).kept_slots;
    for (size_t u = 0; u < after[l].size(); ++u) {
      std::vector<uint32_t> positions;
      for (int64_t s = 0; s < count; ++s) {
        positions.push_back(after[l][u][static_cast<size_t>(s)].position);
        kept.emplace(l, u, positions.back());
      }
      EXPECT_EQ(positions, Choice(*layer.eviction, before[l][u], count))
          << "layer " << l << ", unit " << u;
    }
  }
  return kept;
}

// Runs the model on a given text and calls `receive` with the logits after each
// token. Returns the KeptSlots of the last eviction.
absl::StatusOr<Kept> Force(
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
  Kept kept;
  std::vector<LayerSlots> before;
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
    KVASIR_ASSIGN_OR_RETURN(std::vector<LayerSlots> slots,
                            ReadSlots(*rank, runner, done + count));
    if (done > 0 && runner.slots(1, 0).evicted_at == done) {
      kept = KeptSlots(*rank, runner, before, slots);
    }
    before = std::move(slots);
    done += count;
  }
  EXPECT_EQ(num_received, text.size());
  EXPECT_EQ(runner.slots(1, 0).evicted_at > 0, artifact.eviction.has_value());
  return kept;
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
      artifact.eviction ? "dense-8bit" : plan::kRotatedPreset;
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
  // With bfloat16, a sequence may keep other slots than on a CPU, which can
  // change its logits by any amount.
  const kernels::DType activations =
      artifact.scored() ? kernels::DType::kF32 : kernels::DType::kBf16;
  on_device.make_device = [activations](base::ThreadPool*, kernels::CpuBackend,
                                        int64_t) {
    return kernels::emulation::MakeTestDevice({}, activations);
  };
  const auto kept_on_device =
      Force(artifact, sizes, text, on_device,
            [&](size_t row, absl::Span<const float> logits) {
              device[row].assign(logits.begin(), logits.end());
            });
  if (OnGpu() && absl::IsUnimplemented(kept_on_device.status()) &&
      !artifact.eviction) {
    GTEST_SKIP() << kept_on_device.status().message();
  }
  KVASIR_ASSERT_OK(kept_on_device.status());

  Comparison both;
  RankOptions on_cpu;
  on_cpu.num_threads = OnGpu() ? 8 : 1;
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const Kept kept,
      Force(artifact, sizes, text, on_cpu,
            [&](size_t row, absl::Span<const float> logits) {
              both.Add({logits.begin(), logits.end()}, device[row]);
              if (row + 1 == text.size()) return;
              both.cpu_loss += LossOf(logits, text[row + 1]);
              both.device_loss += LossOf(device[row], text[row + 1]);
            }));
  EXPECT_EQ(kept.empty(), !artifact.eviction);
  std::vector<Kept::value_type> others;
  std::set_difference(kept.begin(), kept.end(), kept_on_device->begin(),
                      kept_on_device->end(), std::back_inserter(others));
  std::printf("%d of %d kept slots differ\n", static_cast<int>(others.size()),
              static_cast<int>(kept.size()));
  // On a GPU the text is long and activations are rounded. On the emulated
  // device only q-hitter's choices may differ: a CPU multiplies codes by
  // queries and weights of 14 bits (code_digits.h), a GPU's plain kernel by
  // float32 numbers. So activations after the first attention differ by up to
  // 5e-4, and some errors of codes, which are stored in steps of 12 %, by one
  // step. The keys and values of the first layer come before any attention.
  const bool close =
      artifact.scored() &&
      (OnGpu() || *artifact.eviction == plan::EvictionMethod::kQHitter);
  EXPECT_LE(others.size(), close ? kept.size() / 20 : 0);
  if (!OnGpu()) {
    for (const auto& [layer, unit, position] : others) {
      EXPECT_GT(layer, 0) << "unit " << unit << ", position " << position;
    }
  }
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
