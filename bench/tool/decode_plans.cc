// `kvasir bench decode --plan` and `--baseline`: compares decode steps over
// compressed caches with steps over the uncompressed cache of the same model.
#include <cstdio>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/cli/progress.h"
#include "base/status_macros.h"
#include "bench/floors.h"
#include "bench/tool/decode.h"
#include "bench/tool/plans.h"
#include "model/shapes/shape_config.h"
#include "plan/presets.h"
#include "worker/program/attention_flops.h"

namespace kvasir::cli {
namespace {

using bench::Quantile;
using bench::RatioOf;
using kvasir::v1::KvPlan;

// A model and the plan of its cache.
struct Candidate {
  std::string name;
  ModelOptions model;
  std::optional<KvPlan> plan;
};

// The models to compare. The one with which the others are compared comes
// first.
absl::StatusOr<std::vector<Candidate>> CandidatesOf(const DecodeFlags& flags) {
  if (!flags.baseline.empty()) {
    if (flags.model.model.empty() || !flags.plans.empty() || flags.bias_cost) {
      return absl::InvalidArgumentError(
          "--baseline DIR needs --model DIR, which is compared with it, and "
          "cannot be used with --plan or --bias-cost");
    }
    Candidate dense{"baseline", flags.model, {}};
    dense.model.model = flags.baseline;
    dense.model.kv_plan.clear();
    return std::vector<Candidate>{dense, {"model", flags.model, {}}};
  }
  if (!flags.model.random_weights || !flags.model.kv_plan.empty()) {
    return absl::InvalidArgumentError(
        "--plan needs --random-weights and --shape NAME, without --kv-plan; to "
        "compare two checkpoints, use --model DIR and --baseline DIR");
  }
  KVASIR_ASSIGN_OR_RETURN(const model::ModelShape shape,
                          model::FindShape(flags.model.shape));
  KVASIR_ASSIGN_OR_RETURN(const model::DecoderSpec spec,
                          model::SpecOfShape(shape));
  std::vector<Candidate> candidates;
  if (flags.bias_cost) {
    if (flags.plans.size() != 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("--bias-cost measures one plan: want one --plan, have ",
                       flags.plans.size()));
    }
    KVASIR_ASSIGN_OR_RETURN(const KvPlan plan,
                            PlanNamed(flags.plans.front(), spec));
    candidates.push_back({"without biases", flags.model, plan});
    candidates.front().model.without_bias = true;
    candidates.push_back({flags.plans.front(), flags.model, plan});
    return candidates;
  }
  candidates.push_back({plan::kDensePreset, flags.model, {}});
  for (const std::string& name : flags.plans) {
    if (name == plan::kDensePreset) continue;
    KVASIR_ASSIGN_OR_RETURN(KvPlan plan, PlanNamed(name, spec));
    candidates.push_back({name, flags.model, std::move(plan)});
  }
  return candidates;
}

absl::StatusOr<std::unique_ptr<BenchEngine>> MakeEngine(
    const DecodeFlags& flags, const Candidate& candidate) {
  // The number of tokens that the samples of all pairs, the warm-up pair
  // included, add to each sequence.
  const int64_t decoded = flags.steps * (BenchPairs(flags.bench) + 1);
  KVASIR_ASSIGN_OR_RETURN(
      auto engine,
      BenchEngine::Create({.model = candidate.model,
                           .plan = candidate.plan,
                           .max_model_len = flags.context + decoded,
                           .max_num_seqs = flags.batch}));
  KVASIR_RETURN_IF_ERROR(FillEngine(flags, engine.get()));
  return engine;
}

// The time of attention over the cache, including the matrix products that
// project queries to latents and the weighted sums back to heads.
double AttentionSeconds(const DecodeSample& sample) {
  return worker::SecondsOf(sample.parts, worker::StepPart::kAttention) +
         worker::SecondsOf(sample.parts, worker::StepPart::kLifts);
}

// The samples of one candidate, and the samples of the uncompressed cache that
// were measured in the same pairs.
struct Samples {
  std::vector<double> seconds;
  std::vector<double> dense_seconds;
  bench::FloorSamples attention;  // attention of all steps
  double flops_per_slot = 0;
  DecodeSample last;
  worker::CpuStepProfile::Seconds parts = {};

  void Add(const DecodeSample& own, const DecodeSample& dense,
           const bench::Ceilings& most) {
    seconds.push_back(own.seconds);
    dense_seconds.push_back(dense.seconds);
    attention.Add(AttentionSeconds(own), AttentionSeconds(dense), most);
    last = own;
    AddParts(own, &parts);
  }
};

// The FLOPs of attention scores and weighted sums for one slot in all layers.
double FlopsPerSlotOf(BenchEngine* engine) {
  const plan::ResolvedPlan& plan = engine->model().rank().plan();
  double flops = 0;
  for (int64_t l = 0; l < plan.shape.num_layers(); ++l) {
    for (const plan::Side side : {plan::Side::kKey, plan::Side::kValue}) {
      const worker::SideFlops of = worker::FlopsPerSlot(plan, l, side);
      flops += static_cast<double>(of.attention + of.reconstruction);
    }
  }
  return flops;
}

// A sample of decode steps with the uncompressed cache (dense), and one with
// the candidate's own cache (own).
struct SamplePair {
  DecodeSample dense;
  DecodeSample own;
};

absl::StatusOr<SamplePair> SampleBoth(const DecodeFlags& flags,
                                      BenchEngine* dense, BenchEngine* own,
                                      bool own_first) {
  SamplePair pair;
  if (own_first) {
    KVASIR_ASSIGN_OR_RETURN(pair.own,
                            DecodeSteps(own, flags.batch, flags.steps));
  }
  KVASIR_ASSIGN_OR_RETURN(pair.dense,
                          DecodeSteps(dense, flags.batch, flags.steps));
  if (!own_first) {
    KVASIR_ASSIGN_OR_RETURN(pair.own,
                            DecodeSteps(own, flags.batch, flags.steps));
  }
  return pair;
}

nlohmann::ordered_json RowOf(const DecodeFlags& flags, const std::string& name,
                             const Samples& samples, double dense_bytes) {
  const auto steps = static_cast<double>(flags.steps);
  const double seconds = Quantile(samples.seconds, 0.5) / steps;
  const bench::PairedRatio speedup =
      RatioOf(samples.dense_seconds, samples.seconds);
  const DecodeSample& last = samples.last;
  const bench::PairedRatio attention =
      RatioOf(samples.attention.baseline_seconds, samples.attention.seconds);
  const double slots = steps * static_cast<double>(flags.batch) *
                       static_cast<double>(flags.context);
  const bench::LaunchCost cost = {last.cache_bytes,
                                  slots * samples.flops_per_slot};
  nlohmann::ordered_json row{
      {"plan", name},
      {"batch", flags.batch},
      {"context", flags.context},
      {"tokens_per_second", static_cast<double>(flags.batch) / seconds},
      {"step_ms", seconds * 1e3},
      {"weight_bytes_per_step", last.weight_bytes / steps},
      {"cache_bytes_per_step", last.cache_bytes / steps},
      {"bytes_per_step", last.bytes() / steps},
      {"bytes_per_second", last.bytes() / steps / seconds},
      {"bytes_ratio", dense_bytes / last.bytes()},
      {"speedup_over_dense", speedup.median},
      {"speedup_spread", speedup.spread},
      {"undecided", speedup.undecided()},
      {"attention_ms", Quantile(samples.attention.seconds, 0.5) / steps * 1e3},
      {"attention_flops_per_step", cost.flops / steps},
      {"attention_bound",
       bench::IsComputeBound(samples.attention, cost) ? "flops" : "bytes"},
      {"attention_floor_ratio",
       bench::FloorRatio(samples.attention, cost).median},
      {"attention_speedup", attention.median},
      {"attention_spread", attention.spread},
      {"attention_undecided", attention.undecided()}};
  if (flags.breakdown) row["breakdown"] = BreakdownOf(samples.parts);
  return row;
}

// Takes one sample for each line of standard input and prints it on one line,
// so that another program can take its own measurements in between.
absl::Status RunPaced(const DecodeFlags& flags, BenchEngine* engine) {
  std::string line;
  std::printf("{\"ready\": true}\n");
  std::fflush(stdout);
  for (int pair = 0; pair <= BenchPairs(flags.bench); ++pair) {
    if (!std::getline(std::cin, line)) break;
    KVASIR_ASSIGN_OR_RETURN(const DecodeSample sample,
                            DecodeSteps(engine, flags.batch, flags.steps));
    const auto steps = static_cast<double>(flags.steps);
    const nlohmann::ordered_json sample_json{
        {"seconds_per_step", sample.seconds / steps},
        {"weight_bytes_per_step", sample.weight_bytes / steps},
        {"cache_bytes_per_step", sample.cache_bytes / steps}};
    std::printf("%s\n", sample_json.dump().c_str());
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

void AddNotes(const DecodeFlags& flags, BenchReport* report) {
  report->AddFigure("context_tokens", static_cast<double>(flags.context));
  report->AddFigure("batch", static_cast<double>(flags.batch));
  if (flags.fill == "prefill") return;
  report->AddNote(
      "the cache holds random latents at the positions of a "
      "prompt: the time of a step does not depend on them, but "
      "its output does");
}

}  // namespace

absl::StatusOr<BenchReport> RunDecodeComparison(DecodeFlags flags) {
  KVASIR_ASSIGN_OR_RETURN(const std::vector<Candidate> candidates,
                          CandidatesOf(flags));
  if (flags.paced) {
    KVASIR_ASSIGN_OR_RETURN(const auto engine,
                            MakeEngine(flags, candidates.back()));
    KVASIR_RETURN_IF_ERROR(RunPaced(flags, engine.get()));
    return BenchReport(nlohmann::ordered_json::object());
  }
  KVASIR_ASSIGN_OR_RETURN(const auto dense,
                          MakeEngine(flags, candidates.front()));
  KVASIR_ASSIGN_OR_RETURN(
      MachineCeilings ceilings,
      MachineCeilings::Create(dense->pool(), flags.bench.quick));
  BenchReport report({});
  Samples own_dense;
  own_dense.flops_per_slot = FlopsPerSlotOf(dense.get());
  std::vector<std::pair<std::string, Samples>> measured;
  for (size_t c = 1; c < candidates.size(); ++c) {
    KVASIR_ASSIGN_OR_RETURN(const auto engine,
                            MakeEngine(flags, candidates[c]));
    // All candidates are measured at the same lengths.
    KVASIR_RETURN_IF_ERROR(dense->Restart(flags.batch, flags.context));
    Samples samples;
    samples.flops_per_slot = FlopsPerSlotOf(engine.get());
    Progress progress(candidates[c].name, BenchPairs(flags.bench), "pairs",
                      true);
    for (int pair = -1; pair < BenchPairs(flags.bench); ++pair) {
      const bench::Ceilings most = ceilings.Measure();
      KVASIR_ASSIGN_OR_RETURN(const SamplePair both,
                              SampleBoth(flags, dense.get(), engine.get(),
                                         /*own_first=*/pair % 2 != 0));
      if (pair < 0) continue;
      samples.Add(both.own, both.dense, most);
      own_dense.Add(both.dense, both.dense, most);
      progress.Update(pair + 1);
    }
    measured.emplace_back(candidates[c].name, std::move(samples));
  }
  if (measured.empty()) {
    return absl::InvalidArgumentError(
        "--plan names only the uncompressed cache, with which "
        "other plans are compared: add another plan");
  }
  report.SetMachine(ceilings.ToJson());
  AddNotes(flags, &report);
  const double dense_bytes = own_dense.last.bytes();
  report.AddRow(RowOf(flags, candidates.front().name, own_dense, dense_bytes));
  for (const auto& [name, samples] : measured) {
    report.AddRow(RowOf(flags, name, samples, dense_bytes));
    report.AddRatio(
        absl::StrCat(name, "_speedup"),
        RatioOf(samples.dense_seconds, samples.seconds),
        flags.bias_cost ? std::optional(Target{0.97, true}) : std::nullopt,
        absl::StrCat(
            "tokens per second, divided by those of the ",
            flags.bias_cost ? "model without biases" : "uncompressed cache"));
    report.AddRatio(
        absl::StrCat(name, "_attention_speedup"),
        RatioOf(samples.attention.baseline_seconds, samples.attention.seconds),
        std::nullopt, "only attention and lifts");
  }
  return report;
}

}  // namespace kvasir::cli
