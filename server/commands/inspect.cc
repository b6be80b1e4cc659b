// `kvasir inspect`: reports the memory and the work that a model's cache takes,
// without reading the weights. With --trace it loads the model, runs a text,
// and reports which tokens the cache keeps.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/cli/flags.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "model/files/file.h"
#include "model/known_models.h"
#include "model/tokenizer/tokenizer.h"
#include "nlohmann/json.hpp"
#include "plan/plan.h"
#include "server/commands/commands.h"
#include "server/flags/options.h"
#include "server/inspect/evaluation.h"
#include "server/inspect/eviction_trace.h"
#include "server/inspect/follow_evictions.h"
#include "server/inspect/html.h"
#include "server/inspect/report.h"
#include "summary/prediction.h"
#include "worker/load/device.h"
#include "worker/load/loaded_model.h"
#include "worker/load/model_source.h"

namespace kvasir::cli {
namespace {

// The longest text for --trace. It is limited because the HTML page contains
// a number for each token, layer and eviction unit (KV heads that evict the
// same tokens).
constexpr int64_t kMaxTraceTokens = 16384;
constexpr int64_t kMaxTraceBytes = int64_t{1} << 20;

struct InspectFlags {
  ModelOptions model;
  int64_t max_batched_tokens = 512;
  std::vector<int64_t> lengths;  // empty: the default of ReportOptions
  std::string html;
  std::vector<std::string> evaluations;
  std::string trace;
  int64_t trace_tokens = 32;
  int64_t tp = 0;  // 0: no table of ranks
  bool json = false;
};

absl::Status WriteFile(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  if (!file) {
    return absl::UnavailableError(
        absl::StrCat(path, ": cannot write the file"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Evaluation>> ReadEvaluations(
    const std::vector<std::string>& paths) {
  std::vector<Evaluation> evaluations;
  for (const std::string& path : paths) {
    KVASIR_ASSIGN_OR_RETURN(const std::string text,
                            ReadTextFile(path, kMaxEvaluationBytes));
    KVASIR_ASSIGN_OR_RETURN(Evaluation evaluation, ParseEvaluation(text, path));
    evaluations.push_back(std::move(evaluation));
  }
  return evaluations;
}

// If there is a file with the planner's prediction next to the plan's file,
// adds the prediction to the report.
absl::Status AddPrediction(const ModelOptions& options,
                           const ModelSource& source, InspectReport* report) {
  const bool own = options.kv_plan.empty();
  if (own ? !source.checkpoint.has_value()
          : !model::FileExists(options.kv_plan)) {
    return absl::OkStatus();
  }
  const std::string path = own ? absl::StrCat(source.checkpoint->folder(),
                                              "/kv_plan.prediction.json")
                               : PredictionPathOfPlan(options.kv_plan);
  if (!model::FileExists(path)) return absl::OkStatus();
  std::string plan = own ? source.checkpoint->kv_plan_json().value_or("") : "";
  if (!own) {
    KVASIR_ASSIGN_OR_RETURN(
        plan, ReadTextFile(options.kv_plan, plan::kMaxPlanJsonBytes));
  }
  KVASIR_ASSIGN_OR_RETURN(const std::string text,
                          ReadTextFile(path, kMaxPredictionBytes));
  KVASIR_ASSIGN_OR_RETURN(Prediction prediction, ParsePrediction(text, path));
  if (prediction.IsOf(plan)) {
    report->prediction = std::move(prediction);
  } else {
    report->foreign_prediction = true;
  }
  return absl::OkStatus();
}

absl::StatusOr<EvictionTrace> Trace(const InspectFlags& flags,
                                    const ModelSource& source) {
  if (std::none_of(source.plan->page_groups.begin(),
                   source.plan->page_groups.end(),
                   [](const auto& group) { return group.eviction.evicts(); })) {
    return absl::InvalidArgumentError(
        absl::StrCat("--trace ", flags.trace,
                     " reports which tokens of this file stay in the cache, "
                     "but the plan evicts none: give --eviction"));
  }
  KVASIR_ASSIGN_OR_RETURN(const std::string text,
                          ReadTextFile(flags.trace, kMaxTraceBytes));
  KVASIR_ASSIGN_OR_RETURN(const auto tokenizer,
                          model::Tokenizer::Load(flags.model.model));
  KVASIR_ASSIGN_OR_RETURN(const std::vector<int32_t> prompt,
                          tokenizer->Encode(text, {.add_special_tokens = true,
                                                   .parse_special = false}));
  const auto prompt_tokens = static_cast<int64_t>(prompt.size());
  const int64_t tokens = prompt_tokens + flags.trace_tokens;
  if (tokens > kMaxTraceTokens) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--trace ", flags.trace, ": the file has ", prompt_tokens,
        " tokens, and ", flags.trace_tokens,
        " are generated (--trace-tokens), but together they may be at most ",
        kMaxTraceTokens));
  }
  const auto loaded =
      LoadedModel::Load({.model = flags.model,
                         .max_model_len = tokens,
                         .max_num_seqs = 1,
                         .max_batched_tokens = flags.max_batched_tokens,
                         .prefix_reuse = false});
  if (!loaded.ok()) {
    return absl::Status(
        loaded.status().code(),
        absl::StrCat("--trace ", flags.trace, ", ", tokens,
                     " tokens with its output: ", loaded.status().message()));
  }
  return FollowEvictions(
      &(*loaded)->rank(), prompt,
      {.output_tokens = flags.trace_tokens,
       .chunk_tokens = flags.max_batched_tokens,
       .text_of = [&](int32_t id) { return tokenizer->TokenBytes(id); }});
}

absl::Status Inspect(const InspectFlags& flags) {
  KVASIR_ASSIGN_OR_RETURN(const std::vector<Evaluation> evaluations,
                          ReadEvaluations(flags.evaluations));
  KVASIR_ASSIGN_OR_RETURN(const ModelSource source,
                          OpenModelSource(flags.model, PlanUse::kLook));
  KVASIR_ASSIGN_OR_RETURN(
      const auto device,
      OpenDevice(flags.model.device, DeviceWishOf(source, flags.model)));
  KVASIR_ASSIGN_OR_RETURN(
      InspectReport report,
      MakeInspectReport(
          source,
          {.page_tokens = flags.model.page_tokens,
           .max_batched_tokens = flags.max_batched_tokens,
           .deterministic =
               !ServeOptionsOf(flags.model, device.get()).lift_prompts,
           .rows_are_invariant = device == nullptr || flags.model.deterministic,
           .granule_bytes =
               device == nullptr ? 0 : device->page_granule_bytes(),
           .matrices = device == nullptr ? worker::MatrixFormat()
                                         : worker::MatrixFormat::Of(*device),
           .tp = flags.tp,
           .lengths = flags.lengths}));
  KVASIR_RETURN_IF_ERROR(AddPrediction(flags.model, source, &report));
  if (!flags.trace.empty()) {
    KVASIR_ASSIGN_OR_RETURN(report.trace, Trace(flags, source));
  }
  if (!flags.html.empty()) {
    KVASIR_RETURN_IF_ERROR(
        WriteFile(flags.html, ReportToHtml(report, evaluations)));
  }
  if (flags.json) {
    std::printf("%s\n",
                ReportToJson(report)
                    .dump(2, ' ', false,
                          nlohmann::ordered_json::error_handler_t::replace)
                    .c_str());
  } else if (flags.html.empty()) {
    std::printf("%s", base::Printable(ReportToText(report)).c_str());
  }
  return absl::OkStatus();
}

}  // namespace

void AddInspectCommand(CLI::App* app, int* exit_code) {
  auto flags = std::make_shared<InspectFlags>();
  CLI::App* command =
      app->add_subcommand("inspect",
                          "report bytes and FLOPs of a model's cache, without "
                          "loading the model; with --trace, load the model and "
                          "report which tokens of a text stay");
  AddModelFlags(command, &flags->model);
  AddDeviceFlags(command, &flags->model.device);
  command->add_option("folder", flags->model.model, "the same as --model")
      ->transform(ModelName(command));
  AddFlag(command, "--max-batched-tokens", flags->max_batched_tokens,
          "the most tokens in one step, for layers with a sliding "
          "window and for --trace")
      ->check(CLI::Range(1, 1 << 20));
  AddFlag(command, "--lengths", flags->lengths,
          "sequence lengths to report; default: the model's length, "
          "and a 4th, a 16th and a 64th of it")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 30));
  AddFlag(command, "--tp", flags->tp,
          "report what each of this many tensor-parallel ranks "
          "holds, and what several ranks hold; 0: no such report")
      ->check(CLI::Range(0, 1 << 20));
  CLI::Option* html = AddFlag(command, "--html", flags->html,
                              "write a self-contained HTML page with charts")
                          ->type_name("FILE");
  AddFlag(command, "--evaluation", flags->evaluations,
          "for --html: files with the output of kvasir-compress "
          "evaluate --json")
      ->type_name("FILE")
      ->needs(html);
  CLI::Option* trace =
      AddFlag(command, "--trace", flags->trace,
              "load the model, run this text and report which of its "
              "tokens each layer kept, and until when; the plan must "
              "evict (--eviction)")
          ->type_name("FILE");
  AddFlag(command, "--trace-tokens", flags->trace_tokens,
          "with --trace: the number of output tokens after the text")
      ->check(CLI::Range(int64_t{0}, kMaxTraceTokens))
      ->needs(trace);
  AddSwitch(command, "--json", flags->json, "print a JSON object");
  command->callback([flags, exit_code] {
    RequireModel(flags->model);
    if (!flags->trace.empty() && flags->model.random_weights) {
      throw CLI::ValidationError("--trace",
                                 "a text needs a tokenizer: give --model DIR");
    }
    const absl::Status status = Inspect(*flags);
    if (status.ok()) return;
    PrintError("kvasir inspect", status.ToString());
    *exit_code = kExitFailed;
  });
}

}  // namespace kvasir::cli
