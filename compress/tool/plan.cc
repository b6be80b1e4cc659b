// `kvasir-compress plan`: chooses the ranks and codecs of a compressed
// checkpoint.
#include "compress/tool/plan.h"

#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/cli/flags.h"
#include "base/cli/version.h"
#include "base/log.h"
#include "base/sha256.h"
#include "base/status_macros.h"
#include "compress/artifact/new_file.h"
#include "compress/runtime/cpu_setup.h"
#include "compress/runtime/torch_status.h"
#include "compress/tool/calibration.h"
#include "compress/tool/commands.h"
#include "compress/tool/method.h"
#include "compress/tool/report.h"
#include "model/shapes/tp_dealt.h"
#include "nlohmann/json.hpp"
#include "plan/plan.h"
#include "plan/tp_size.h"
#include "summary/prediction.h"
#include "summary/rank_summary.h"

namespace kvasir::cli {
namespace {

struct PlanFlags {
  CalibrationFlags calibration;
  MethodFlags method;
  std::string out;
  bool dry_run = false;
  bool json = false;
};

absl::Status RunPlan(const PlanFlags& flags) {
  KVASIR_ASSIGN_OR_RETURN(const model::Checkpoint checkpoint,
                          OpenBase(flags.calibration));
  // These checks come before the work that takes minutes.
  KVASIR_RETURN_IF_ERROR(
      plan::CheckTpSize(model::TpDealtOf(checkpoint.spec()), flags.method.tp));
  const bool writes = !flags.out.empty() && !flags.dry_run;
  if (writes) {
    const absl::Status writable = compress::CheckWritable(flags.out);
    if (!writable.ok()) {
      return absl::Status(writable.code(),
                          absl::StrCat("--out: ", writable.message()));
    }
  }
  KVASIR_ASSIGN_OR_RETURN(const CalibrationInputs inputs,
                          PrepareCalibration(flags.calibration, checkpoint,
                                             NeedsOfPlanner(flags.method)));
  KVASIR_ASSIGN_OR_RETURN(
      const MadePlan made,
      PlanWithProvenance(flags.method, flags.calibration, checkpoint, inputs));
  const kvasir::v1::KvPlan& plan = made.plan;
  std::optional<RankSummary> ranks;
  if (flags.method.tp > 1) {
    KVASIR_ASSIGN_OR_RETURN(
        ranks, RanksOfPlan(plan, checkpoint.spec(), flags.method.tp));
  }
  if (flags.json) {
    KVASIR_ASSIGN_OR_RETURN(nlohmann::ordered_json report,
                            PlanReportJson(plan, checkpoint));
    if (ranks) report["tensor_parallel"] = RanksJson(*ranks);
    if (made.prediction) {
      report["prediction"] = PredictionJson(*made.prediction);
    }
    std::printf("%s\n", report.dump(2).c_str());
  } else {
    KVASIR_ASSIGN_OR_RETURN(const std::string report,
                            PlanReportText(plan, checkpoint));
    std::printf("%s", base::Printable(report).c_str());
    if (ranks) std::printf("\n%s", RanksText(*ranks).c_str());
    if (made.prediction) {
      std::printf("\n%s", PredictionText(*made.prediction).c_str());
    }
  }
  if (!writes) return absl::OkStatus();
  if (const auto prediction = PredictionFileText(made)) {
    KVASIR_RETURN_IF_ERROR(compress::WriteFileAtomically(
        PredictionPathOfPlan(flags.out), *prediction));
  }
  return compress::WriteFileAtomically(flags.out, plan::PlanToJson(plan));
}

}  // namespace

absl::StatusOr<MadePlan> PlanWithProvenance(const MethodFlags& method,
                                            const CalibrationFlags& calibration,
                                            const model::Checkpoint& checkpoint,
                                            const CalibrationInputs& inputs) {
  MadePlan made;
  if (method.method == kAutoMethod) {
    compress::SetBlasThreads(1);
    KVASIR_ASSIGN_OR_RETURN(compress::AutoPlan planned,
                            MakeAutoPlan(method.automatic, method.exact_sinks,
                                         method.kv_bytes_per_token, method.tp,
                                         calibration, checkpoint, inputs));
    made.plan = std::move(planned.plan);
    made.prediction = std::move(planned.prediction);
  } else {
    KVASIR_ASSIGN_OR_RETURN(
        made.plan, compress::CatchTorch([&] {
          return MakePlan(
              method, checkpoint, inputs.calibration(),
              [&](kvasir::v1::KvPlan candidate) -> absl::StatusOr<double> {
                KVASIR_RETURN_IF_ERROR(
                    AddEviction(method, checkpoint, candidate));
                return BytesPerToken(candidate, checkpoint.spec());
              });
        }));
  }
  KVASIR_RETURN_IF_ERROR(AddEviction(method, checkpoint, made.plan));
  // The prediction is for a cache that keeps all tokens, so it is dropped if
  // tokens are evicted.
  if (!method.eviction.method.empty()) made.prediction.reset();
  auto* provenance = made.plan.mutable_provenance();
  provenance->set_tool_version(absl::StrCat("kvasir-compress ", kVersion));
  // If eviction is added to another plan, the seed of that plan stays, because
  // eviction does not change its weights.
  if (method.evict_from.empty()) provenance->set_seed(calibration.seed);
  RecordCalibration(calibration, inputs, &made.plan);
  return made;
}

std::optional<std::string> PredictionFileText(const MadePlan& made) {
  if (!made.prediction) return std::nullopt;
  nlohmann::ordered_json json = {
      {"plan_sha256", base::Sha256Hex(plan::PlanToJson(made.plan))}};
  json.update(PredictionJson(*made.prediction));
  return json.dump(1) + "\n";
}

void AddPlanCommand(CLI::App* app, int* exit_code) {
  auto flags = std::make_shared<PlanFlags>();
  CLI::App* command = app->add_subcommand(
      "plan", "Decides ranks and codecs of a compressed checkpoint");
  command->group("Commands");
  AddCalibrationFlags(command, flags->calibration);
  AddMethodFlags(command, flags->method, /*required=*/true);
  AddFlag(command, "--out", flags->out,
          "File to write the plan to (default: it is only shown)");
  AddSwitch(command, "--dry-run", flags->dry_run, "Write nothing");
  AddSwitch(command, "--json", flags->json, "Print a JSON object");
  command->callback([flags, exit_code] {
    CheckMethodFlags(flags->method);
    Report(RunPlan(*flags), exit_code);
  });
}

}  // namespace kvasir::cli
