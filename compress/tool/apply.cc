// `kvasir-compress apply`: writes the compressed checkpoint of a plan. Makes
// the plan first if none is given.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/cli/flags.h"
#include "base/cli/progress.h"
#include "base/cli/units.h"
#include "base/log.h"
#include "base/machine.h"
#include "base/status_macros.h"
#include "base/string_view.h"
#include "compress/apply/apply_cost.h"
#include "compress/apply/layer_applier.h"
#include "compress/artifact/artifact_writer.h"
#include "compress/calibrate/calibration_cost.h"
#include "compress/methods/low_rank.h"
#include "compress/methods/method.h"
#include "compress/runtime/torch_status.h"
#include "compress/tensors/tensor_loader.h"
#include "compress/tool/calibration.h"
#include "compress/tool/commands.h"
#include "compress/tool/method.h"
#include "compress/tool/plan.h"
#include "compress/tool/report.h"
#include "model/files/file.h"
#include "model/shapes/attention_shape.h"
#include "nlohmann/json.hpp"
#include "plan/plan.h"
#include "summary/prediction.h"

namespace kvasir::cli {
namespace {

using compress::ArtifactOptions;
using kvasir::v1::KvPlan;

struct ApplyFlags {
  CalibrationFlags calibration;
  MethodFlags method;
  std::string plan;
  std::string dtype = "auto";
  ArtifactOptions artifact;
  bool dry_run = false;
  bool profile = false;
  bool json = false;
};

struct Applied {
  KvPlan plan;
  compress::FactorProfile factors;
  absl::Duration elapsed;
};

absl::StatusOr<KvPlan> ReadPlan(const std::string& path,
                                const model::Checkpoint& checkpoint) {
  KVASIR_ASSIGN_OR_RETURN(const std::string text,
                          model::ReadSmallFile(path, plan::kMaxPlanJsonBytes));
  KVASIR_ASSIGN_OR_RETURN(KvPlan plan, plan::ParsePlanJson(text, path));
  const absl::Status valid =
      plan::ValidatePlan(plan, model::AttentionShapeOf(checkpoint.spec()));
  if (valid.ok()) return plan;
  return absl::Status(
      valid.code(), absl::StrCat(path, " is not a plan for ", checkpoint.name(),
                                 ": ", valid.message()));
}

// Returns the content of the prediction file that belongs to the plan; nothing
// if there is none. Prints why if the file cannot be used.
std::optional<std::string> ReadPredictionBeside(const std::string& path,
                                                const KvPlan& plan,
                                                bool quiet) {
  const std::string name = PredictionPathOfPlan(path);
  if (!model::FileExists(name)) return std::nullopt;
  const auto read = [&]() -> absl::StatusOr<std::string> {
    KVASIR_ASSIGN_OR_RETURN(std::string text,
                            model::ReadSmallFile(name, kMaxPredictionBytes));
    KVASIR_ASSIGN_OR_RETURN(const Prediction prediction,
                            ParsePrediction(text, name));
    if (prediction.IsOf(plan::PlanToJson(plan))) return text;
    return absl::FailedPreconditionError(
        absl::StrCat(name, " belongs to another plan"));
  };
  absl::StatusOr<std::string> text = read();
  if (text.ok()) return *std::move(text);
  if (!quiet) {
    std::fprintf(
        stderr, "no prediction is kept: %s\n",
        base::Printable(base::StdView(text.status().message())).c_str());
  }
  return std::nullopt;
}

void AddNeeds(const kvasir::v1::Part& part,
              compress::Decomposition decomposition, CalibrationNeeds& needs) {
  const kvasir::v1::Codec& codec = part.codec();
  needs.sample = needs.sample || codec.has_channel_static();
  const bool moments =
      part.has_rope_low_rank() || part.mean() || part.latent_bias() ||
      codec.has_basis_static() ||
      (part.has_low_rank() && decomposition != compress::Decomposition::kSvd);
  needs.statistics = needs.statistics || moments;
  if (part.has_full() && codec.has_basis_static() &&
      part.stored() == kvasir::v1::POST_ROPE) {
    needs.parts.rotated_keys = true;
  }
}

CalibrationNeeds NeedsOfAppliers(const KvPlan& plan,
                                 compress::Decomposition decomposition) {
  CalibrationNeeds needs;
  for (const kvasir::v1::LayerPlan& layer : plan.layers()) {
    for (const auto* parts :
         {&layer.key().parts(), &layer.value().parts(), &layer.joint()}) {
      for (const kvasir::v1::Part& part : *parts) {
        AddNeeds(part, decomposition, needs);
      }
    }
  }
  needs.parts.information = decomposition == compress::Decomposition::kFisher;
  return needs;
}

// Measures what applying the plan needs, unless `inputs` has it already.
absl::Status Complete(const CalibrationFlags& flags,
                      const model::Checkpoint& checkpoint,
                      const CalibrationNeeds& needs,
                      CalibrationInputs& inputs) {
  const bool has_statistics =
      inputs.run &&
      (!needs.parts.rotated_keys ||
       inputs.run->calibration.layers[0].rotated_key_gram.defined()) &&
      (!needs.parts.information || inputs.run->calibration.has_information());
  if ((!needs.statistics || has_statistics) &&
      (!needs.sample || inputs.sample)) {
    return absl::OkStatus();
  }
  KVASIR_ASSIGN_OR_RETURN(inputs, PrepareCalibration(flags, checkpoint, needs));
  return absl::OkStatus();
}

absl::Status SayCost(const ApplyFlags& flags,
                     const model::Checkpoint& checkpoint, const KvPlan& plan,
                     const CalibrationInputs& inputs) {
  const compress::ApplyCost cost =
      compress::CostOfApply(checkpoint, plan, inputs.calibration(),
                            inputs.sample ? &*inputs.sample : nullptr);
  const double rate =
      compress::MeasureOperationsPerSecond(flags.calibration.threads);
  if (!flags.calibration.quiet) {
    absl::FPrintF(
        stderr,
        "apply: memory up to %s (calibration %s, one layer %s%s), "
        "about %s\n",
        HumanBytes(static_cast<double>(cost.peak_bytes())),
        HumanBytes(static_cast<double>(cost.calibration_bytes)),
        HumanBytes(static_cast<double>(cost.layer_bytes)),
        cost.hidden_bytes == 0
            ? ""
            : absl::StrCat(", hidden states ",
                           HumanBytes(static_cast<double>(cost.hidden_bytes))),
        HumanTime(compress::TimeOfApply(cost, rate)));
  }
  return absl::OkStatus();
}

absl::Status WriteWeights(const ApplyFlags& flags,
                          const model::Checkpoint& checkpoint,
                          const CalibrationInputs& inputs, Applied& applied) {
  compress::LayerApplier::Options options;
  options.ranges.threads = flags.calibration.threads;
  options.profile = &applied.factors;
  if (flags.artifact.dtype) {
    options.ranges.stored = compress::ScalarTypeOf(*flags.artifact.dtype);
  } else {
    KVASIR_ASSIGN_OR_RETURN(options.ranges.stored,
                            compress::StoredTypeOf(checkpoint));
  }
  KVASIR_ASSIGN_OR_RETURN(
      compress::LayerApplier applier,
      compress::LayerApplier::Create(
          checkpoint, applied.plan, inputs.calibration(),
          inputs.sample ? &*inputs.sample : nullptr, options));
  Progress line("apply", checkpoint.spec().num_layers(), "layers",
                !flags.calibration.quiet);
  return compress::WriteArtifact(
      checkpoint, applied.plan, flags.artifact,
      [&](int64_t layer) { return applier.Apply(layer); },
      [&](const compress::ArtifactProgress& progress) {
        line.Update(progress.layers);
        return !StopAsked();
      });
}

absl::Status PrintResult(const ApplyFlags& flags,
                         const model::Checkpoint& checkpoint,
                         const Applied& applied) {
  const compress::FactorProfile& factors = applied.factors;
  const double ratio = factors.lapack_seconds > 0.0
                           ? factors.svd_seconds / factors.lapack_seconds
                           : 0.0;
  if (flags.json) {
    KVASIR_ASSIGN_OR_RETURN(nlohmann::ordered_json report,
                            PlanReportJson(applied.plan, checkpoint));
    report["out"] = flags.artifact.out.string();
    report["seconds"] = absl::ToDoubleSeconds(applied.elapsed);
    report["svds"] = factors.num_svds;
    report["svd_seconds"] = factors.svd_seconds;
    if (flags.profile) {
      report["lapack_seconds"] = factors.lapack_seconds;
      report["svd_over_lapack"] = ratio;
    }
    std::printf("%s\n", report.dump(2).c_str());
    return absl::OkStatus();
  }
  KVASIR_ASSIGN_OR_RETURN(const std::string report,
                          PlanReportText(applied.plan, checkpoint));
  std::printf("%s", base::Printable(report).c_str());
  if (flags.dry_run) return absl::OkStatus();
  absl::PrintF("\n%s: %.1f s, %.1f s of it in %d decompositions\n",
               base::Printable(flags.artifact.out.string()),
               absl::ToDoubleSeconds(applied.elapsed), factors.svd_seconds,
               factors.num_svds);
  if (flags.profile) {
    absl::PrintF("LAPACK takes %.1f s for the same matrices: ratio %.2f\n",
                 factors.lapack_seconds, ratio);
  }
  return absl::OkStatus();
}

absl::Status RunApply(const CLI::App& command, ApplyFlags& flags) {
  const absl::Time start = absl::Now();
  KVASIR_ASSIGN_OR_RETURN(const model::Checkpoint checkpoint,
                          OpenBase(flags.calibration));
  if (flags.dtype != "auto") {
    flags.artifact.dtype = flags.dtype == "f32"   ? model::TensorType::kF32
                           : flags.dtype == "f16" ? model::TensorType::kF16
                                                  : model::TensorType::kBF16;
  }
  if (!flags.calibration.tokenizer.empty()) {
    flags.artifact.tokenizer = flags.calibration.tokenizer;
  }
  if (!flags.dry_run) {
    KVASIR_RETURN_IF_ERROR(
        compress::CheckArtifactOutput(checkpoint, flags.artifact));
  }
  Applied applied;
  applied.factors.measure_lapack = flags.profile;
  CalibrationInputs inputs;
  if (flags.plan.empty()) {
    KVASIR_ASSIGN_OR_RETURN(inputs,
                            PrepareCalibration(flags.calibration, checkpoint,
                                               NeedsOfPlanner(flags.method)));
    KVASIR_ASSIGN_OR_RETURN(MadePlan made,
                            PlanWithProvenance(flags.method, flags.calibration,
                                               checkpoint, inputs));
    if (made.prediction && !flags.json) {
      std::printf("%s\n", PredictionText(*made.prediction).c_str());
    }
    flags.artifact.prediction = PredictionFileText(made);
    applied.plan = std::move(made.plan);
  } else {
    KVASIR_ASSIGN_OR_RETURN(applied.plan, ReadPlan(flags.plan, checkpoint));
    if (flags.method.eviction.method.empty()) {
      flags.artifact.prediction = ReadPredictionBeside(flags.plan, applied.plan,
                                                       flags.calibration.quiet);
    }
    KVASIR_RETURN_IF_ERROR(AddEviction(flags.method, checkpoint, applied.plan));
  }
  if (flags.dry_run) return PrintResult(flags, checkpoint, applied);
  KVASIR_ASSIGN_OR_RETURN(const compress::Decomposition decomposition,
                          compress::DecompositionOf(applied.plan));
  CalibrationNeeds needs = NeedsOfAppliers(applied.plan, decomposition);
  if (!flags.plan.empty()) {
    UseCalibrationOf(applied.plan, command, &flags.calibration, &needs);
  }
  KVASIR_RETURN_IF_ERROR(
      Complete(flags.calibration, checkpoint, needs, inputs));
  // The provenance names the calibration that the plan was made with. If there
  // is none, it names the calibration from which factors are computed.
  if (applied.plan.provenance().calibration_id().empty()) {
    RecordCalibration(flags.calibration, inputs, &applied.plan);
  }
  KVASIR_RETURN_IF_ERROR(SayCost(flags, checkpoint, applied.plan, inputs));
  KVASIR_RETURN_IF_ERROR(compress::CatchTorch(
      [&] { return WriteWeights(flags, checkpoint, inputs, applied); }));
  applied.elapsed = absl::Now() - start;
  return PrintResult(flags, checkpoint, applied);
}

}  // namespace

void AddApplyCommand(CLI::App* app, int* exit_code) {
  auto flags = std::make_shared<ApplyFlags>();
  CLI::App* command = app->add_subcommand(
      "apply", "Writes the compressed checkpoint of a plan, or of a method");
  command->group("Commands");
  AddCalibrationFlags(command, flags->calibration);
  AddMethodFlags(command, flags->method, /*required=*/false);
  AddFlag(command, "--plan", flags->plan,
          "Plan file that the command plan has written, applied with the "
          "calibration that the plan names; instead of --method");
  ArtifactOptions& artifact = flags->artifact;
  AddFlag(command, "--out", artifact.out, "Folder to write");
  AddFlag(command, "--dtype", flags->dtype,
          "Type of the attention weights: bf16, f16, f32, or auto, which "
          "means the model's type")
      ->check(CLI::IsMember({"auto", "bf16", "f16", "f32"}));
  AddBytes(command, "--max-shard-bytes", artifact.max_shard_bytes,
           "Larger checkpoints become several files", {.least = 1});
  AddSwitch(command, "--link-base", artifact.link_base,
            "Link tensors that equal the base model's instead of copying them: "
            "the new folder is small, but needs the base model's folder at its "
            "place");
  AddSwitch(command, "--overwrite", artifact.overwrite,
            "Replace an existing checkpoint");
  AddSwitch(command, "--dry-run", flags->dry_run,
            "Show the plan and write nothing");
  AddSwitch(command, "--profile", flags->profile,
            "Also measure the time of plain LAPACK on the same matrices");
  AddSwitch(command, "--json", flags->json, "Print a JSON object");
  command->callback([command, flags, exit_code] {
    if (flags->plan.empty() == flags->method.method.empty()) {
      throw CLI::ValidationError("give either --plan or --method");
    }
    if (flags->artifact.out.empty() && !flags->dry_run) {
      throw CLI::ValidationError("--out is required");
    }
    CheckMethodFlags(flags->method);
    Report(RunApply(*command, *flags), exit_code);
  });
}

}  // namespace kvasir::cli
