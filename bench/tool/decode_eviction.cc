// `kvasir bench decode --eviction-cost`: what scores of slots and evictions
// take of a step, against the same cache without eviction.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/cli/progress.h"
#include "base/status_macros.h"
#include "bench/tool/decode.h"
#include "bench/tool/eviction_plans.h"
#include "bench/tool/plans.h"
#include "model/shapes/attention_shape.h"
#include "model/shapes/shape_config.h"
#include "plan/eviction.h"
#include "plan/plan.h"

namespace kvasir::cli {
namespace {

using bench::Quantile;
using kvasir::v1::KvPlan;

constexpr int64_t kObservationWindow = 64;  // of one that counts few queries
// The finest unit of fewer bits may take more.
constexpr double kMostShare = 0.05;
constexpr double kMostShareOfFine = 0.15;
constexpr int64_t kCoarseBits = 8;

// A cache that evicts.
struct EvictingCase {
  std::string plan;
  std::string unit;  // "layer" or "KV head"
  int64_t bits = 0;
  int64_t observation_window = 0;

  double target() const {
    return unit == "layer" || bits >= kCoarseBits ? kMostShare
                                                  : kMostShareOfFine;
  }
};

// As many tokens as the sequences have at first all stay, and some more go
// where the next point is.
struct Points {
  int64_t context = 0;
  int64_t every = 0;

  int64_t first() const { return (context / every + 1) * every; }
  int64_t most_tokens() const { return first() + 2; }
};

absl::StatusOr<KvPlan> EvictingPlanOf(const DecodeFlags& flags,
                                      const EvictingCase& of,
                                      const plan::AttentionShape& shape,
                                      const KvPlan& plan) {
  plan::EvictionSettings settings = flags.model.eviction.settings;
  if (!flags.model.eviction.method.empty()) {
    KVASIR_ASSIGN_OR_RETURN(settings.method, plan::ParseEvictionMethod(
                                                 flags.model.eviction.method));
  }
  settings.budget = {.tokens = static_cast<uint32_t>(flags.context)};
  settings.observation_window = static_cast<uint32_t>(of.observation_window);
  return EvictingPlan(
      settings,
      of.unit == "layer" ? EvictionUnit::kLayer : EvictionUnit::kKvHead, shape,
      plan);
}

absl::StatusOr<std::unique_ptr<BenchEngine>> MakeEngine(
    const DecodeFlags& flags, const Points& points, KvPlan plan) {
  ModelOptions model = flags.model;
  model.eviction = {};  // it is the plan's
  KVASIR_ASSIGN_OR_RETURN(
      auto engine, BenchEngine::Create({.model = model,
                                        .plan = std::move(plan),
                                        .max_model_len = points.most_tokens(),
                                        .max_num_seqs = flags.batch,
                                        .max_batched_tokens = std::max(
                                            points.every, flags.batch)}));
  KVASIR_RETURN_IF_ERROR(
      engine->FillWithRandomLatents(flags.batch, flags.context));
  // All sequences have their pages from here on.
  KVASIR_RETURN_IF_ERROR(engine->Decode(flags.batch));
  return engine;
}

// Steps of both caches, and what an eviction took, by pair.
struct CostSamples {
  int64_t steps = 1;  // of a sample
  int64_t every = 1;  // tokens between two points
  std::vector<double> with;
  std::vector<double> without;
  std::vector<double> eviction;        // seconds of one; none in a prompt
  std::vector<double> attention_more;  // seconds of a step
  std::vector<double> append_more;
  // That a step reads.
  double cache_bytes = 0;
  double cache_bytes_without = 0;

  void Add(const DecodeSample& own, const DecodeSample& plain,
           double seconds_of_eviction) {
    const auto of_step = [&](double seconds) {
      return seconds / static_cast<double>(steps);
    };
    const auto more = [&](worker::StepPart part) {
      return of_step(worker::SecondsOf(own.parts, part) -
                     worker::SecondsOf(plain.parts, part));
    };
    with.push_back(of_step(own.seconds));
    without.push_back(of_step(plain.seconds));
    eviction.push_back(seconds_of_eviction);
    attention_more.push_back(more(worker::StepPart::kAttention));
    append_more.push_back(more(worker::StepPart::kAppend));
    cache_bytes = of_step(own.cache_bytes);
    cache_bytes_without = of_step(plain.cache_bytes);
  }
};

// A share is small against what it is taken from, so that a spread of times
// alone says little: where the middle half of the pairs lies on both sides of
// the target, they do not decide it either.
nlohmann::ordered_json RowOf(const EvictingCase& of, const std::string& what,
                             bool has_target, const CostSamples& samples) {
  std::vector<double> whole;  // of a step, evictions spread over steps
  std::vector<double> scoring;
  std::vector<double> evicting;
  std::vector<double> both;
  for (size_t i = 0; i < samples.with.size(); ++i) {
    const double eviction =
        samples.eviction[i] / static_cast<double>(samples.every);
    whole.push_back(samples.with[i] + eviction);
    scoring.push_back((samples.with[i] - samples.without[i]) / whole[i]);
    evicting.push_back(eviction / whole[i]);
    both.push_back(scoring[i] + evicting[i]);
  }
  const bench::PairedRatio ratio = bench::RatioOf(whole, samples.without);
  const double share = Quantile(both, 0.5);
  const double low = Quantile(both, 0.25);
  const double high = Quantile(both, 0.75);
  bool undecided = ratio.undecided();
  nlohmann::ordered_json row{
      {"plan", of.plan},
      {"bits", of.bits},
      {"unit", of.unit},
      {"what", what},
      {"step_ms", Quantile(whole, 0.5) * 1e3},
      {"without_ms", Quantile(samples.without, 0.5) * 1e3},
      {"scoring_share", Quantile(scoring, 0.5)},
      {"eviction_share", Quantile(evicting, 0.5)},
      {"share", share},
      {"share_low", low},
      {"share_high", high},
      {"spread", ratio.spread},
      {"attention_more_ms", Quantile(samples.attention_more, 0.5) * 1e3},
      {"append_more_ms", Quantile(samples.append_more, 0.5) * 1e3}};
  if (has_target) {
    undecided = undecided || (low <= of.target() && of.target() <= high);
    row["eviction_ms"] = Quantile(samples.eviction, 0.5) * 1e3;
    row["every_tokens"] = samples.every;
    row["target"] = of.target();
    row["cache_bytes_per_step"] = samples.cache_bytes;
    row["cache_bytes_without"] = samples.cache_bytes_without;
    row["met"] = !undecided && share <= of.target();
  }
  row["undecided"] = undecided;
  return row;
}

// All sequences evict in one step; it ends with them as they were before.
absl::StatusOr<double> SecondsOfEviction(const DecodeFlags& flags,
                                         const Points& points,
                                         BenchEngine* engine) {
  engine->Rewind(flags.batch, points.first() - 1, flags.context);
  // Scores that differ.
  KVASIR_RETURN_IF_ERROR(engine->Decode(flags.batch));
  KVASIR_ASSIGN_OR_RETURN(const DecodeSample sample,
                          DecodeSteps(engine, flags.batch, 1));
  return worker::SecondsOf(sample.parts, worker::StepPart::kEviction);
}

absl::StatusOr<DecodeSample> DecodeSampleOf(const DecodeFlags& flags,
                                            BenchEngine* engine) {
  engine->Rewind(flags.batch, flags.context, flags.context);
  return DecodeSteps(engine, flags.batch, flags.steps);
}

// The last chunk of a prompt, of as many tokens as one runs at once that evicts
// on its way.
absl::StatusOr<DecodeSample> PromptSampleOf(const DecodeFlags& flags,
                                            const Points& points,
                                            BenchEngine* engine) {
  const int64_t chunk = std::min(points.every, flags.context);
  engine->Rewind(1, flags.context - chunk, flags.context);
  absl::Status status;
  DecodeSample sample;
  engine->profile().Start();
  sample.seconds =
      bench::SecondsOf([&] { status = engine->PrefillStep(1, chunk); });
  sample.parts = engine->profile().Stop();
  KVASIR_RETURN_IF_ERROR(status);
  return sample;
}

using SampleOf = std::function<absl::StatusOr<DecodeSample>(BenchEngine*)>;

// Pairs of the same step with eviction and without; who is first alternates,
// and the first pair warms up.
absl::Status Measure(const DecodeFlags& flags, const std::string& name,
                     const SampleOf& sample_of,
                     const std::function<absl::StatusOr<double>()>& evict,
                     BenchEngine* own, BenchEngine* plain,
                     CostSamples* samples) {
  Progress progress(name, BenchPairs(flags.bench), "pairs", true);
  for (int pair = -1; pair < BenchPairs(flags.bench); ++pair) {
    DecodeSample with;
    DecodeSample without;
    for (const bool is_own : {pair % 2 != 0, pair % 2 == 0}) {
      KVASIR_ASSIGN_OR_RETURN((is_own ? with : without),
                              sample_of(is_own ? own : plain));
    }
    KVASIR_ASSIGN_OR_RETURN(const double eviction, evict());
    if (pair < 0) continue;
    samples->Add(with, without, eviction);
    progress.Update(pair + 1);
  }
  return absl::OkStatus();
}

absl::Status MeasureCase(const DecodeFlags& flags, const Points& points,
                         const EvictingCase& of, BenchEngine* own,
                         BenchEngine* plain, BenchReport* report) {
  const std::string name = absl::StrCat(of.plan, ", ", of.unit);
  if (of.observation_window == 0) {
    CostSamples samples = {.steps = flags.steps, .every = points.every};
    KVASIR_RETURN_IF_ERROR(Measure(
        flags, name,
        [&](BenchEngine* engine) { return DecodeSampleOf(flags, engine); },
        [&] { return SecondsOfEviction(flags, points, own); }, own, plain,
        &samples));
    const nlohmann::ordered_json row = RowOf(of, "decode", true, samples);
    const std::string figure = absl::StrCat(
        of.plan, of.unit == "layer" ? "_layer" : "_kv_head", "_eviction_share");
    report->AddFigure(figure, row["share"].get<double>(),
                      Target{of.target(), false}, "of a decode step");
    if (row["undecided"].get<bool>()) report->MarkUndecided(figure);
    report->AddRow(row);
  }
  CostSamples prompts;
  KVASIR_RETURN_IF_ERROR(Measure(
      flags, absl::StrCat(name, ", prompt"),
      [&](BenchEngine* engine) {
        return PromptSampleOf(flags, points, engine);
      },
      [] { return 0.0; }, own, plain, &prompts));
  report->AddRow(RowOf(
      of,
      of.observation_window == 0
          ? "prompt, all queries"
          : absl::StrCat("prompt, last ", of.observation_window, " queries"),
      false, prompts));
  return absl::OkStatus();
}

absl::Status CheckCostFlags(const DecodeFlags& flags, const Points& points) {
  if (!flags.model.random_weights || !flags.model.kv_plan.empty() ||
      !flags.baseline.empty() || flags.paced) {
    return absl::InvalidArgumentError(
        "--eviction-cost is measured with random weights and --plan: "
        "--random-weights --shape NAME, without --kv-plan, --baseline and "
        "--paced");
  }
  if (flags.breakdown) {
    return absl::InvalidArgumentError(
        "--eviction-cost tells its own parts of a step: leave out --breakdown");
  }
  if (flags.fill == "prefill") {
    return absl::InvalidArgumentError(
        "--eviction-cost fills caches with random latents: leave out --fill "
        "prefill");
  }
  const EvictionFlags unset;
  if (flags.model.eviction.budget != unset.budget ||
      flags.model.eviction.settings.observation_window > 0) {
    return absl::InvalidArgumentError(
        "--eviction-cost: --eviction-budget is --context, and prompts are "
        "measured with --eviction-observation-window and without: give "
        "neither");
  }
  if (flags.context + flags.steps <= points.first()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "--eviction-cost: ", flags.steps, " --steps behind a --context of ",
      flags.context, " pass the eviction at ", points.first()));
}

}  // namespace

absl::StatusOr<BenchReport> RunEvictionCost(DecodeFlags flags) {
  const Points points = {.context = flags.context,
                         .every = flags.model.eviction.settings.every_tokens};
  KVASIR_RETURN_IF_ERROR(CheckCostFlags(flags, points));
  if (flags.plans.empty()) flags.plans = {"dense-8bit", "rotated-4bit"};
  KVASIR_ASSIGN_OR_RETURN(const model::ModelShape shape,
                          model::FindShape(flags.model.shape));
  KVASIR_ASSIGN_OR_RETURN(const model::DecoderSpec spec,
                          model::SpecOfShape(shape));
  const plan::AttentionShape attention = model::AttentionShapeOf(spec);
  for (const plan::LayerShape& layer : attention.layers) {
    if (layer.sliding_window == 0) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "--eviction-cost: ", flags.model.shape, " has a sliding window of ",
        layer.sliding_window, " tokens, and layers without one are measured"));
  }
  BenchReport report({});
  for (const std::string& name : flags.plans) {
    KVASIR_ASSIGN_OR_RETURN(const KvPlan plan, PlanNamed(name, spec));
    // Codes and where keys are rotated are the plan's with an eviction on it.
    KVASIR_ASSIGN_OR_RETURN(
        const KvPlan any_evicting,
        EvictingPlanOf(flags, {name, "layer"}, attention, plan));
    KVASIR_ASSIGN_OR_RETURN(
        const auto plain,
        MakeEngine(flags, points, WithoutEviction(any_evicting)));
    for (const char* unit : {"layer", "KV head"}) {
      for (const int64_t window : {int64_t{0}, kObservationWindow}) {
        const EvictingCase of = {name, unit, FewestBits(plan), window};
        KVASIR_ASSIGN_OR_RETURN(KvPlan evicting,
                                EvictingPlanOf(flags, of, attention, plan));
        KVASIR_ASSIGN_OR_RETURN(const auto own,
                                MakeEngine(flags, points, std::move(evicting)));
        KVASIR_RETURN_IF_ERROR(
            MeasureCase(flags, points, of, own.get(), plain.get(), &report));
      }
    }
    KVASIR_ASSIGN_OR_RETURN(
        MachineCeilings ceilings,
        MachineCeilings::Create(plain->pool(), flags.bench.quick));
    report.SetMachine(ceilings.ToJson());
  }
  if (BenchPairs(flags.bench) <
      static_cast<int>(bench::PairedRatio::kFewestPairs)) {
    report.AddNote(absl::StrCat(BenchPairs(flags.bench), " pairs, fewer than ",
                                bench::PairedRatio::kFewestPairs,
                                ": they decide nothing"));
  }
  report.AddFigure("context_tokens", static_cast<double>(flags.context));
  report.AddFigure("batch", static_cast<double>(flags.batch));
  report.AddNote(
      "share: of a step's time, what it takes more than the same step without "
      "eviction, and an eviction of all sequences spread over the tokens "
      "between two; undecided, too, where the middle half of the pairs lies "
      "on both sides of the target");
  report.AddNote(
      "the cache holds random latents, and as many slots with eviction as "
      "without; a chunk of a prompt is the last one of a sequence");
  return report;
}

}  // namespace kvasir::cli
