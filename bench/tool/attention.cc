// `kvasir bench attention`: compares attention over compressed caches with
// attention over the uncompressed cache and with the machine's limits.
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/cli/flags.h"
#include "base/cli/progress.h"
#include "base/machine.h"
#include "base/status_macros.h"
#include "bench/attention_layers.h"
#include "bench/floors.h"
#include "bench/tool/bench.h"
#include "bench/tool/report.h"
#include "model/known_models.h"
#include "plan/presets.h"
#include "worker/load/model_options.h"
#include "worker/program/attention_flops.h"

namespace kvasir::cli {
namespace {

// The most arenas. Each arena belongs to a layer, and no model has more layers
// (model/shapes/config.cc).
constexpr int64_t kMostArenas = 1024;

using bench::AttentionLayers;
using bench::LaunchShape;
using bench::PairedRatio;
using plan::PlanPreset;

constexpr double kPrefillTarget = 1.1;
constexpr int64_t kQuickFootprintBytes = int64_t{1} << 20;

struct AttentionFlags {
  BenchFlags bench;
  std::string backend = "cpu";
  std::vector<std::string> shapes = {"llama-2-7b", "llama-3-8b",
                                     "tinyllama-1.1b"};
  std::vector<std::string> methods;
  std::vector<int64_t> contexts = {4096, 16384, 65536};
  int64_t batch = 0;
  int64_t cached_tokens = 65536;
  int64_t page_tokens = 64;
  int threads = 0;
  bool prefill = false;
  bool deterministic = false;
  int64_t chunk = 512;
};

void ApplyQuick(AttentionFlags* flags) {
  if (flags->methods.empty()) {
    for (const PlanPreset& preset : plan::PlanPresets()) {
      flags->methods.push_back(preset.name);
    }
  }
  if (flags->prefill && !WasAsked(flags->bench, "--context")) {
    flags->contexts = {4096};
  }
  if (!flags->bench.quick) return;
  if (!WasAsked(flags->bench, "--shape")) flags->shapes = {"kvasir-tiny"};
  if (!WasAsked(flags->bench, "--context")) flags->contexts = {96, 256};
  UseQuick<int64_t>(flags->bench, "--cached-tokens", 512,
                    &flags->cached_tokens);
  UseQuick<int64_t>(flags->bench, "--chunk", 24, &flags->chunk);
}

// The bytes of all arenas together; each arena is one layer's cache. Without
// --quick they are four times the last-level cache, so that an arena's data has
// left the CPU's caches when the arena is used again.
int64_t FootprintBytes(const BenchFlags& flags) {
  return flags.quick ? kQuickFootprintBytes : MachineCeilings::FootprintBytes();
}

// Runs all launches for one model shape.
class ShapeBench {
 public:
  ShapeBench(const AttentionFlags& flags, const model::ModelShape& shape,
             base::ThreadPool* pool, MachineCeilings* ceilings,
             BenchReport* report)
      : flags_(flags),
        shape_(shape),
        pool_(pool),
        ceilings_(ceilings),
        report_(report) {}

  absl::Status Run(Progress* progress, int64_t* done) {
    KVASIR_RETURN_IF_ERROR(Make(plan::kDensePreset, &dense_));
    for (const std::string& method : flags_.methods) {
      std::unique_ptr<AttentionLayers> own;
      const bool is_dense = method == plan::kDensePreset;
      if (!is_dense) KVASIR_RETURN_IF_ERROR(Make(method, &own));
      AttentionLayers* const layers = is_dense ? dense_.get() : own.get();
      for (const int64_t context : flags_.contexts) {
        KVASIR_RETURN_IF_ERROR(Measure(method, layers, LaunchOf(context)));
        progress->Update(++*done, absl::StrCat(shape_.name, " ", method));
      }
    }
    return absl::OkStatus();
  }

 private:
  LaunchShape LaunchOf(int64_t context) const {
    LaunchShape launch;
    launch.context = context;
    if (flags_.prefill) {
      launch.new_tokens = std::min(flags_.chunk, context);
      return launch;
    }
    launch.batch = flags_.batch > 0 ? flags_.batch
                                    : std::clamp<int64_t>(
                                          flags_.cached_tokens / context, 1, 8);
    return launch;
  }

  // Makes the layers that run a compression method, with so many arenas
  // (caches) that together they exceed the CPU's caches even in the smallest
  // launch.
  absl::Status Make(const std::string& method,
                    std::unique_ptr<AttentionLayers>* layers) {
    int64_t most_slots = 0;
    int64_t fewest_slots = 0;
    for (const int64_t context : flags_.contexts) {
      const LaunchShape launch = LaunchOf(context);
      const int64_t pages =
          (context + flags_.page_tokens - 1) / flags_.page_tokens;
      most_slots =
          std::max(most_slots, launch.batch * pages * flags_.page_tokens);
      fewest_slots = fewest_slots == 0 ? launch.slots()
                                       : std::min(fewest_slots, launch.slots());
    }
    KVASIR_ASSIGN_OR_RETURN(
        const double bytes,
        AttentionLayers::BytesPerSlot(shape_, method, flags_.page_tokens));
    const auto arenas_of = [](double have, double each) {
      return static_cast<int64_t>(have / each);
    };
    const int64_t wanted =
        1 + arenas_of(static_cast<double>(FootprintBytes(flags_.bench)),
                      bytes * static_cast<double>(fewest_slots));
    // Uses half of the free memory; the rest is for the baseline or for
    // weights.
    const auto free =
        static_cast<double>(base::ReadMachineLimits().available_bytes);
    const auto slots = static_cast<double>(most_slots);
    const int64_t held = arenas_of(free / 2, bytes * slots);
    if (held < 2) {
      return absl::ResourceExhaustedError(
          absl::StrCat(shape_.name, " ", method, ": two arenas of ", most_slots,
                       " slots take ", static_cast<int64_t>(2 * bytes * slots),
                       " bytes, but half of the free memory is ",
                       static_cast<int64_t>(free / 2),
                       "; lower --context or --cached-tokens"));
    }
    const int64_t arenas = std::min({wanted, held, kMostArenas});
    if (arenas < wanted) {
      report_->AddNote(absl::StrCat(shape_.name, " ", method, ": ", arenas,
                                    " arenas of the ", wanted, " wanted"));
    }
    KVASIR_ASSIGN_OR_RETURN(
        *layers, AttentionLayers::Create(
                     {.shape = shape_,
                      .plan = method,
                      .page_tokens = flags_.page_tokens,
                      .slots = most_slots,
                      .num_arenas = std::max<int64_t>(2, arenas),
                      .lift_prompts = flags_.prefill && !flags_.deterministic},
                     pool_));
    return absl::OkStatus();
  }

  // The results of a launch over the uncompressed cache, and of one over the
  // cache of a method.
  struct LaunchPair {
    bench::LaunchTime dense;
    bench::LaunchTime own;
  };
  absl::StatusOr<LaunchPair> RunPair(AttentionLayers* layers,
                                     const LaunchShape& launch,
                                     bool own_first) {
    LaunchPair pair;
    if (layers == dense_.get()) {
      KVASIR_ASSIGN_OR_RETURN(pair.own, layers->Run(launch));
      pair.dense = pair.own;
      return pair;
    }
    if (own_first) {
      KVASIR_ASSIGN_OR_RETURN(pair.own, layers->Run(launch));
    }
    KVASIR_ASSIGN_OR_RETURN(pair.dense, dense_->Run(launch));
    if (!own_first) {
      KVASIR_ASSIGN_OR_RETURN(pair.own, layers->Run(launch));
    }
    return pair;
  }

  absl::Status Measure(const std::string& method, AttentionLayers* layers,
                       const LaunchShape& launch) {
    bench::FloorSamples samples;
    std::vector<double> layer_seconds;
    std::vector<double> dense_layer_seconds;
    for (int pair = -1; pair < BenchPairs(flags_.bench); ++pair) {
      const bench::Ceilings most = ceilings_->Measure();
      KVASIR_ASSIGN_OR_RETURN(
          const LaunchPair both,
          RunPair(layers, launch, /*own_first=*/pair % 2 != 0));
      if (pair < 0) continue;  // the first pair warms up
      samples.Add(both.own.attention_seconds, both.dense.attention_seconds,
                  most);
      layer_seconds.push_back(both.own.layer_seconds);
      dense_layer_seconds.push_back(both.dense.layer_seconds);
    }
    if (flags_.prefill) {
      return AddPrefillRow(method, *layers, launch,
                           bench::RatioOf(layer_seconds, dense_layer_seconds),
                           layer_seconds);
    }
    return AddRow(method, *layers, launch, samples);
  }

  bench::LaunchCost CostOfSlot(const AttentionLayers& layers) const {
    bench::LaunchCost cost;
    for (const plan::Side side : {plan::Side::kKey, plan::Side::kValue}) {
      const worker::SideFlops flops =
          worker::FlopsPerSlot(layers.plan(), 0, side);
      cost.flops += static_cast<double>(flops.attention + flops.reconstruction);
    }
    cost.bytes = layers.bytes_per_slot();
    return cost;
  }

  absl::Status AddRow(const std::string& method, const AttentionLayers& layers,
                      const LaunchShape& launch,
                      const bench::FloorSamples& samples) {
    KVASIR_ASSIGN_OR_RETURN(const PlanPreset preset,
                            plan::FindPlanPreset(method));
    const bench::LaunchCost slot = CostOfSlot(layers);
    const auto slots = static_cast<double>(launch.slots());
    const bench::LaunchCost cost = {slot.bytes * slots, slot.flops * slots};
    const auto batch = static_cast<double>(launch.batch);
    const PairedRatio floor = FloorRatio(samples, cost);
    const PairedRatio speedup =
        bench::RatioOf(samples.baseline_seconds, samples.seconds);
    const double footprint =
        static_cast<double>(layers.num_arenas()) * cost.bytes;
    const auto caches = static_cast<double>(base::LastLevelCacheBytes());
    const bool undecided =
        floor.undecided() ||
        footprint < static_cast<double>(MachineCeilings::FootprintBytes());
    nlohmann::ordered_json row{
        {"method", method},
        {"shape", shape_.name},
        {"context", launch.context},
        {"batch", launch.batch},
        {"us_per_token", bench::Quantile(samples.seconds, 0.5) / batch * 1e6},
        {"bytes_per_token", cost.bytes / batch},
        {"flops_per_token", cost.flops / batch},
        {"bandwidth_share", BandwidthShare(samples, cost).median},
        {"bound", IsComputeBound(samples, cost) ? "flops" : "bytes"},
        {"floor_ratio", floor.median},
        {"floor_ratio_spread", floor.spread},
        {"speedup_over_dense", speedup.median},
        {"speedup_spread", speedup.spread},
        {"bytes_ratio", dense_->bytes_per_slot() / slot.bytes},
        {"arenas", layers.num_arenas()},
        {"footprint_bytes", footprint}};
    if (caches > 0) row["footprint_over_llc"] = footprint / caches;
    AddVerdict(preset.floor_target, floor.median, undecided, &row);
    if (speedup.undecided()) row["speedup_undecided"] = true;
    report_->AddRow(std::move(row));
    return absl::OkStatus();
  }

  absl::Status AddPrefillRow(const std::string& method,
                             const AttentionLayers& layers,
                             const LaunchShape& launch,
                             const PairedRatio& over_dense,
                             const std::vector<double>& layer_seconds) {
    const auto tokens = static_cast<double>(launch.tokens());
    nlohmann::ordered_json row{
        {"method", method},
        {"shape", shape_.name},
        {"context", launch.context},
        {"chunk", launch.new_tokens},
        {"lifted", layers.lifts_prompts()},
        {"us_per_token", bench::Quantile(layer_seconds, 0.5) / tokens * 1e6},
        {"over_dense", over_dense.median},
        {"over_dense_spread", over_dense.spread}};
    const bool is_dense = method == plan::kDensePreset;
    AddVerdict(is_dense ? std::nullopt : std::optional(kPrefillTarget),
               over_dense.median, over_dense.undecided(), &row);
    report_->AddRow(std::move(row));
    return absl::OkStatus();
  }

  static void AddVerdict(std::optional<double> target, double value,
                         bool undecided, nlohmann::ordered_json* row) {
    if (target.has_value()) {
      (*row)["target"] = *target;
      (*row)["met"] = !undecided && value <= *target;
    }
    (*row)["undecided"] = undecided;
  }

  const AttentionFlags& flags_;
  const model::ModelShape shape_;
  base::ThreadPool* const pool_;
  MachineCeilings* const ceilings_;
  BenchReport* const report_;
  std::unique_ptr<AttentionLayers> dense_;
};

// Adds the number of rows that meet their targets to the report.
void AddSummary(BenchReport* report) {
  double asked = 0;
  double met = 0;
  double undecided = 0;
  for (const nlohmann::ordered_json& row : report->rows()) {
    if (row["undecided"].get<bool>()) ++undecided;
    if (!row.contains("target")) continue;
    ++asked;
    if (row["met"].get<bool>()) ++met;
  }
  report->AddFigure("rows_with_target", asked);
  report->AddFigure("rows_met", met);
  report->AddFigure("rows_undecided", undecided);
}

absl::StatusOr<BenchReport> RunAttention(AttentionFlags flags) {
  ApplyQuick(&flags);
  for (const std::string& method : flags.methods) {
    KVASIR_RETURN_IF_ERROR(plan::FindPlanPreset(method).status());
  }
  base::ThreadPool pool(flags.threads > 0 ? flags.threads
                                          : base::ReadMachineLimits().cpus);
  KVASIR_ASSIGN_OR_RETURN(MachineCeilings ceilings,
                          MachineCeilings::Create(&pool, flags.bench.quick));
  BenchReport report({});
  const auto total = static_cast<int64_t>(
      flags.shapes.size() * flags.methods.size() * flags.contexts.size());
  Progress progress(flags.prefill ? "prefill" : "attention", total, "rows",
                    true);
  int64_t done = 0;
  for (const std::string& name : flags.shapes) {
    KVASIR_ASSIGN_OR_RETURN(const model::ModelShape shape,
                            model::FindShape(name));
    KVASIR_RETURN_IF_ERROR(ShapeBench(flags, shape, &pool, &ceilings, &report)
                               .Run(&progress, &done));
  }
  progress.Finish();
  report.SetMachine(ceilings.ToJson());
  AddSummary(&report);
  return report;
}

std::string Footer() {
  std::string text =
      "One launch is one layer's attention for a decode token of each of\n"
      "`batch` sequences (with --prefill: for a chunk of one sequence). Every\n"
      "launch reads another arena, and the arenas of a method are together\n"
      "four times as large as the last-level cache, or 256 MiB if that is\n"
      "more (footprint_bytes); rows with less are undecided.\n"
      "Columns:\n"
      "  us_per_token       time of attention over the cache for a new token,\n"
      "                     including lifts of queries and sums\n"
      "  bytes_per_token    bytes of codes, numbers and ranges that it reads\n"
      "  flops_per_token    FLOPs of scores, sums and rebuilt keys (a\n"
      "                     multiply-add counts as two)\n"
      "  bandwidth_share    bytes per second, as a share of the machine's\n"
      "  bound              which floor is higher: bytes or flops\n"
      "  floor_ratio        time divided by that floor, from the same pair\n"
      "  speedup_over_dense time with the bf16 cache / time of the method\n"
      "  bytes_ratio        bytes of the bf16 cache / bytes of the method\n"
      "  lifted             --prefill: some of the latents are lifted\n"
      "  over_dense         --prefill: time of all attention ops of the "
      "layer,\n"
      "                     divided by that with the bf16 cache\n"
      "Methods (measured without the tokens that they keep exact):\n";
  for (const PlanPreset& preset : plan::PlanPresets()) {
    absl::StrAppend(&text, "  ", preset.name, ": ", preset.text, "\n");
  }
  return text;
}

}  // namespace

void AddBenchAttention(CLI::App* group, int* exit_code) {
  auto flags = std::make_shared<AttentionFlags>();
  CLI::App* command = group->add_subcommand(
      "attention",
      "compare attention over compressed caches with the bf16 "
      "cache and the machine's limits");
  AddFlag(command, "--backend", flags->backend,
          "the device whose kernels are measured")
      ->check(CLI::IsMember({"cpu"}));
  AddFlag(command, "--shape", flags->shapes,
          "model shapes whose heads are used")
      ->delimiter(',')
      ->check(ShapeName());
  AddFlag(command, "--method", flags->methods,
          "methods, listed below; default: all")
      ->delimiter(',');
  AddFlag(command, "--context", flags->contexts,
          "the number of slots to which a new token attends; default with "
          "--prefill: 4096")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 20));
  AddFlag(command, "--batch", flags->batch,
          "sequences in a launch; 0: at most 8, and at most "
          "--cached-tokens slots in total")
      ->check(CLI::Range(0, 1024));
  AddFlag(command, "--cached-tokens", flags->cached_tokens,
          "if --batch is 0: the most slots in a launch, unless one "
          "sequence has more")
      ->check(CLI::Range(1, 1 << 24));
  AddFlag(command, "--page-tokens", flags->page_tokens, "slots in a cache page")
      ->check(CLI::IsMember({16, 32, 64, 128}));
  AddFlag(command, "--threads", flags->threads,
          "compute threads; 0: as many as the cgroup allows")
      ->check(CLI::Range(0, 1024));
  AddSwitch(command, "--prefill", flags->prefill,
            "measure a chunk of a prompt instead of decode tokens");
  AddFlag(command, "--chunk", flags->chunk,
          "with --prefill: the number of tokens in the chunk")
      ->check(CLI::Range(1, 1 << 16));
  AddSwitch(command, "--deterministic", flags->deterministic,
            "with --prefill: do not lift latents");
  AddBenchFlags(command, &flags->bench);
  AddSimdFlag(command, &flags->bench);
  command->footer(Footer());
  SetBench(
      command, std::shared_ptr<const BenchFlags>(flags, &flags->bench),
      [flags] { return RunAttention(*flags); }, exit_code);
}

}  // namespace kvasir::cli
