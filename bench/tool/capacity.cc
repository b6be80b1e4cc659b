// `kvasir bench capacity`: measures how many sequences of a given length fit
// into a page pool, for each checkpoint or plan.
#include "bench/capacity.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/cli/flags.h"
#include "base/machine.h"
#include "base/status_macros.h"
#include "base/thread_pool.h"
#include "bench/tool/bench.h"
#include "bench/tool/plans.h"
#include "bench/tool/report.h"
#include "model/known_models.h"
#include "model/shapes/shape_config.h"
#include "plan/plan.h"
#include "worker/load/model_source.h"
#include "worker/ranks/rank.h"

namespace kvasir::cli {
namespace {

struct CapacityFlags {
  BenchFlags bench;
  std::vector<std::string> models;
  std::vector<std::string> shapes;
  std::vector<std::string> plans;
  std::string kv_dtype = "auto";
  worker::CapacityOptions options = {.pool_bytes = int64_t{1} << 30,
                                     .sequence_tokens = 4096};
};

struct Source {
  ModelOptions model;
  std::string plan;  // empty: the folder's own plan, or no compression
};

// The models to measure: every folder, and every shape with every plan.
std::vector<Source> Sources(const CapacityFlags& flags) {
  std::vector<Source> sources;
  ModelOptions model;
  model.kv_dtype = flags.kv_dtype;
  model.page_tokens = flags.options.page_tokens;
  for (const std::string& folder : flags.models) {
    model.model = folder;
    sources.push_back({model, ""});
  }
  model.model.clear();
  model.random_weights = true;
  for (const std::string& shape : flags.shapes) {
    model.shape = shape;
    if (flags.plans.empty()) sources.push_back({model, ""});
    for (const std::string& plan : flags.plans)
      sources.push_back({model, plan});
  }
  return sources;
}

absl::StatusOr<ModelSource> Open(const Source& source) {
  if (source.plan.empty()) return OpenModelSource(source.model, PlanUse::kRun);
  KVASIR_ASSIGN_OR_RETURN(const model::ModelShape shape,
                          model::FindShape(source.model.shape));
  KVASIR_ASSIGN_OR_RETURN(const model::DecoderSpec spec,
                          model::SpecOfShape(shape));
  KVASIR_ASSIGN_OR_RETURN(kvasir::v1::KvPlan plan,
                          PlanNamed(source.plan, spec));
  return OpenModelSource(source.model, PlanUse::kRun, std::move(plan));
}

absl::StatusOr<worker::Capacity> Measure(const model::DecoderSpec& spec,
                                         const kvasir::v1::KvPlan& plan,
                                         const CapacityFlags& flags) {
  KVASIR_RETURN_IF_ERROR(worker::CheckPoolFitsMemory(
      {.pool_bytes = flags.options.pool_bytes,
       .available_bytes = base::ReadMachineLimits().available_bytes}));
  return worker::MeasureCapacity(spec, plan, flags.options);
}

absl::StatusOr<nlohmann::ordered_json> CapacityRow(const Source& asked,
                                                   const CapacityFlags& flags) {
  KVASIR_ASSIGN_OR_RETURN(const ModelSource source, Open(asked));
  KVASIR_ASSIGN_OR_RETURN(const worker::Capacity own,
                          Measure(source.spec, source.plan->source, flags));
  KVASIR_ASSIGN_OR_RETURN(
      const worker::Capacity dense,
      Measure(source.spec,
              plan::FullRankPlan(source.plan->shape, kvasir::v1::BF16), flags));
  nlohmann::ordered_json row = {
      {"model", source.name},
      {"plan", asked.plan},
      {"method", source.plan->source.method()},
      {"kv_bytes_per_token", own.kv_bytes_per_token},
      {"bytes_per_sequence", own.bytes_per_sequence},
      {"pool_bytes", own.pool_bytes},
      {"pool_pages", own.pool_pages},
      {"held_bytes", own.held_bytes},
      {"predicted", own.predicted},
      {"reached", own.reached},
      {"dense_bytes_per_sequence", dense.bytes_per_sequence},
      {"dense_reached", dense.reached},
      {"dense_bytes_over_bytes",
       static_cast<double>(dense.bytes_per_sequence) /
           static_cast<double>(own.bytes_per_sequence)}};
  row["reached_over_dense"] = nullptr;
  if (dense.reached > 0) {
    row["reached_over_dense"] =
        static_cast<double>(own.reached) / static_cast<double>(dense.reached);
  }
  return row;
}

absl::StatusOr<BenchReport> RunCapacity(CapacityFlags flags) {
  UseQuick(flags.bench, "--pool", int64_t{16} << 20, &flags.options.pool_bytes);
  UseQuick(flags.bench, "--tokens", int64_t{256},
           &flags.options.sequence_tokens);
  if (flags.models.empty() && flags.shapes.empty()) {
    ModelOptions model;
    DefaultBenchModel(flags.bench, &model);
    flags.shapes = {model.shape};
  }
  base::ThreadPool pool(base::ReadMachineLimits().cpus);
  KVASIR_ASSIGN_OR_RETURN(MachineCeilings ceilings,
                          MachineCeilings::Create(&pool, true));
  BenchReport report(ceilings.ToJson());
  report.AddFigure("pool_bytes", static_cast<double>(flags.options.pool_bytes));
  report.AddFigure("sequence_tokens",
                   static_cast<double>(flags.options.sequence_tokens));
  for (const Source& source : Sources(flags)) {
    KVASIR_ASSIGN_OR_RETURN(nlohmann::ordered_json row,
                            CapacityRow(source, flags));
    if (row["predicted"] != row["reached"]) {
      report.AddNote(row["model"].get<std::string>() +
                     ": the scheduler reached another number than the layout "
                     "predicts");
    }
    report.AddRow(std::move(row));
  }
  return report;
}

}  // namespace

void AddBenchCapacity(CLI::App* group, int* exit_code) {
  auto flags = std::make_shared<CapacityFlags>();
  CLI::App* command = group->add_subcommand(
      "capacity",
      "measure how many sequences fit into a page pool, and "
      "compare that with the prediction and with an "
      "uncompressed bf16 cache");
  command->footer(
      "predicted: the number of sequences by the layout's bytes. reached: the\n"
      "number that a server's scheduler and cache run at the same time, with\n"
      "--tokens tokens each: arenas of the pool's size are allocated and\n"
      "touched, prompts of one token less are admitted in one step until the\n"
      "next one does not fit, and one token of each is decoded. No model runs\n"
      "and no weights are read.");
  AddModelFlag(command, "--model", flags->models,
               "folders of Hugging Face checkpoints, or names of known "
               "models, separated by commas")
      ->delimiter(',');
  CLI::Option* const shape =
      AddFlag(command, "--shape", flags->shapes,
              "model shapes instead of folders, separated by commas: "
              "tinyllama-1.1b, llama-3-8b, ...");
  shape->delimiter(',')->check(ShapeName());
  AddFlag(command, "--plan", flags->plans,
          "plans for each --shape, instead of no compression: "
          "kv_plan.json files, or names that `kvasir bench "
          "attention --help` lists")
      ->delimiter(',')
      ->needs(shape);
  AddFlag(command, "--kv-dtype", flags->kv_dtype,
          "number type of the cache without a plan; auto: the "
          "weights' type")
      ->check(CLI::IsMember({"auto", "f32", "f16", "bf16"}));
  AddBytes(command, "--pool", flags->options.pool_bytes,
           "size of the page pool", {.least = 1});
  AddFlag(command, "--tokens", flags->options.sequence_tokens,
          "tokens of a sequence")
      ->check(CLI::Range(2, 1 << 24));
  AddFlag(command, "--page-tokens", flags->options.page_tokens,
          "slots in a cache page")
      ->check(CLI::IsMember({16, 32, 64, 128}));
  AddBenchFlags(command, &flags->bench);
  SetBench(
      command, std::shared_ptr<const BenchFlags>(flags, &flags->bench),
      [flags] { return RunCapacity(*flags); }, exit_code);
}

}  // namespace kvasir::cli
