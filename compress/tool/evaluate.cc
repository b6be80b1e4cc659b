// `kvasir-compress evaluate`: measures the loss of compressed models compared
// with their teacher, and the bytes of their caches.
#include "compress/evaluate/evaluate.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/cli/flags.h"
#include "base/cli/progress.h"
#include "base/log.h"
#include "base/machine.h"
#include "base/status_macros.h"
#include "compress/artifact/new_file.h"
#include "compress/calibrate/calibration_sample.h"
#include "compress/calibrate/token_stream.h"
#include "compress/evaluate/baselines.h"
#include "compress/evaluate/eviction_spec.h"
#include "compress/runtime/cpu_setup.h"
#include "compress/runtime/device.h"
#include "compress/tool/commands.h"
#include "model/checkpoint/checkpoint.h"
#include "model/known_models.h"
#include "model/shapes/attention_shape.h"
#include "model/tokenizer/tokenizer.h"
#include "plan/eviction_flags.h"
#include "plan/plan.h"

namespace kvasir::cli {
namespace {

using compress::Candidate;
using compress::Evaluation;
using compress::EvaluationRow;
using compress::Evaluator;
using compress::ReferenceDecoder;

// The name in the list of evictions that means no eviction.
constexpr char kNoEviction[] = "none";

struct EvaluateFlags {
  std::string teacher;
  std::vector<std::string> candidates;
  std::string text;
  std::string tokenizer;
  std::string calibration_text;
  int64_t calibration_tokens = 16384;
  uint64_t seed = 42;
  int64_t windows = 100;
  int64_t window_tokens = 512;
  bool repeat_test = false;
  int64_t repeats = 16;
  int64_t repeat_tokens = 0;
  int64_t filler_tokens = 0;
  int64_t key_error_windows = 0;
  std::vector<std::string> evictions = {kNoEviction};
  std::vector<std::string> budgets = {EvictionFlags().budget};
  plan::EvictionSettings eviction;
  std::string json;
  std::string device = "auto";
  int threads = 1;
  bool quiet = false;
};

struct LoadedModel {
  std::string name;
  std::unique_ptr<ReferenceDecoder> decoder;
};

// Returns the plan of a checkpoint, if it has one, with the exact tokens that
// the candidate's name requests.
absl::StatusOr<std::optional<kvasir::v1::KvPlan>> PlanOf(
    const compress::PlannedName& name, const model::Checkpoint& checkpoint) {
  std::optional<kvasir::v1::KvPlan> plan;
  if (checkpoint.kv_plan_json().has_value()) {
    KVASIR_ASSIGN_OR_RETURN(
        plan, plan::ParsePlanJson(*checkpoint.kv_plan_json(),
                                  absl::StrCat(name.folder, "/kv_plan.json")));
  }
  if (!name.settings.empty()) {
    if (!plan.has_value() || !plan::SetExactTokens(name.exact, &*plan)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "sinks= and window= can be used only with a model whose plan has "
          "codes, but ",
          name.folder, " has no such plan"));
    }
  }
  if (plan.has_value()) {
    plan::ClampExactRows(checkpoint.spec().max_position_embeddings, &*plan);
  }
  return plan;
}

absl::StatusOr<LoadedModel> LoadModel(const compress::PlannedName& name,
                                      at::Device device) {
  KVASIR_ASSIGN_OR_RETURN(const model::Checkpoint checkpoint,
                          model::Checkpoint::Open(name.folder));
  KVASIR_ASSIGN_OR_RETURN(const std::optional<kvasir::v1::KvPlan> plan,
                          PlanOf(name, checkpoint));
  std::string shown = checkpoint.name();
  if (!name.settings.empty()) absl::StrAppend(&shown, ":", name.settings);
  KVASIR_ASSIGN_OR_RETURN(
      ReferenceDecoder decoder,
      ReferenceDecoder::Load(checkpoint, plan, {.device = device}));
  return LoadedModel{std::move(shown),
                     std::make_unique<ReferenceDecoder>(std::move(decoder))};
}

// Returns token ids [B, T] for the ranges of per-channel baselines and the
// rotations of oscar; an undefined tensor if there is no calibration text.
absl::StatusOr<at::Tensor> CalibrationIds(const EvaluateFlags& flags,
                                          const model::Tokenizer& tokenizer,
                                          const ReferenceDecoder& teacher) {
  if (flags.calibration_text.empty()) return at::Tensor();
  KVASIR_ASSIGN_OR_RETURN(
      const compress::TokenStream text,
      compress::EncodeFile(flags.calibration_text, tokenizer, flags.threads));
  KVASIR_ASSIGN_OR_RETURN(
      const compress::CalibrationSample sample,
      compress::SampleCalibration(text,
                                  {.tokens = flags.calibration_tokens,
                                   .sequence_tokens = flags.window_tokens,
                                   .seed = flags.seed},
                                  teacher.spec().vocab_size));
  std::vector<at::Tensor> rows;
  for (const std::vector<int32_t>& sequence : sample.sequences) {
    rows.push_back(
        at::tensor(std::vector<int64_t>(sequence.begin(), sequence.end())));
  }
  return at::stack(rows);
}

void PrintHead(const Evaluation& evaluation, bool repeat) {
  const Evaluation::Teacher& teacher = evaluation.teacher;
  absl::PrintF(
      "teacher %s: %.4f nats per token, %.4f per byte; %d windows of %d tokens "
      "of %s\n\n",
      base::Printable(teacher.model), teacher.nats_per_token,
      teacher.nats_per_byte, evaluation.windows, evaluation.window_tokens,
      base::Printable(evaluation.text));
  absl::PrintF("%-28s %11s %10s %9s %23s %6s %9s%s\n", "model", "bytes/token",
               "nats", "ppl", "added nats (95 %)", "top-1", "KL",
               repeat ? "    repeat" : "");
}

void PrintRow(const EvaluationRow& row) {
  absl::PrintF("%-28s %11.1f %10.4f %9.3f %8.4f [%.4f, %.4f] %6.3f %9.5f",
               base::Printable(row.model), row.kv_bytes_per_token,
               row.nats_per_token, row.perplexity, row.added_nats_per_token,
               row.added_low, row.added_high, row.top1_agreement, row.kl_nats);
  if (row.repeat_nats_per_token) {
    absl::PrintF(" %9.4f", *row.repeat_nats_per_token);
  }
  if (row.key_error.has_value()) {
    absl::PrintF("  (keys off by %.4f)", row.key_error->relative);
  }
  if (row.evicts.has_value()) {
    absl::PrintF("  (%.0f bytes a window)", row.kv_bytes_per_sequence);
  }
  if (row.exact_sinks + row.exact_window > 0) {
    absl::PrintF("  (exact: %d first, %d latest tokens, %d bytes a sequence)",
                 row.exact_sinks, row.exact_window,
                 row.fixed_bytes_per_sequence);
  }
  if (row.clamp_rate > 0.0) {
    absl::PrintF("  (%.2g %% clamped)", 100.0 * row.clamp_rate);
  }
  absl::PrintF("\n");
}

// Evaluates one candidate after the other. Each candidate is loaded only when
// it is evaluated.
class EvaluateRun {
 public:
  explicit EvaluateRun(const EvaluateFlags& flags) : flags_(flags) {}

  absl::Status Run() {
    const absl::Status status = Measure();
    EndLine();
    // Prints the report even if a candidate has failed: it then has the rows of
    // the candidates before the failed one.
    if (!report_.has_value()) return status;
    PrintHead(*report_, flags_.repeat_test);
    for (const EvaluationRow& row : report_->rows) PrintRow(row);
    return status;
  }

 private:
  absl::Status Measure() {
    KVASIR_RETURN_IF_ERROR(CheckNames());
    KVASIR_ASSIGN_OR_RETURN(device_, compress::OpenDevice(flags_.device));
    KVASIR_ASSIGN_OR_RETURN(
        const std::unique_ptr<model::Tokenizer> tokenizer,
        model::Tokenizer::Load(flags_.tokenizer.empty() ? flags_.teacher
                                                        : flags_.tokenizer));
    KVASIR_ASSIGN_OR_RETURN(
        compress::EvaluationText text,
        compress::ReadEvaluationText(flags_.text, *tokenizer, flags_.threads));
    KVASIR_ASSIGN_OR_RETURN(teacher_,
                            LoadModel({.folder = flags_.teacher}, device_));
    if (teacher_.decoder->plan().has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--teacher: ", flags_.teacher,
                       " is compressed; give the uncompressed checkpoint that "
                       "the candidates were made from"));
    }
    KVASIR_ASSIGN_OR_RETURN(
        const Candidate teacher,
        compress::MakeCandidate(teacher_.name, *teacher_.decoder));
    KVASIR_ASSIGN_OR_RETURN(
        calibration_ids_,
        CalibrationIds(flags_, *tokenizer, *teacher_.decoder));
    compress::SetBlasThreads(1);
    KVASIR_RETURN_IF_ERROR(MakeBaselines());
    label_ = teacher_.name;
    KVASIR_ASSIGN_OR_RETURN(
        evaluator_, Evaluator::Create(teacher, std::move(text), Options()));
    report_ = evaluator_->report();
    for (const std::string& name : flags_.candidates) {
      EndLine();
      label_ = name;
      KVASIR_RETURN_IF_ERROR(EvaluateOne(name));
    }
    return absl::OkStatus();
  }

  // Writes the report so far. It is called after every candidate, so that
  // results survive an interruption.
  absl::Status WriteReport() const {
    if (flags_.json.empty()) return absl::OkStatus();
    return compress::WriteFileAtomically(
        flags_.json, compress::EvaluationToJson(*report_) + "\n");
  }

  // Checks the names, so that errors are found before the teacher runs, which
  // takes long.
  absl::Status CheckNames() {
    if (!flags_.json.empty()) {
      KVASIR_RETURN_IF_ERROR(compress::CheckWritable(flags_.json));
    }
    for (const std::string& name : flags_.evictions) {
      if (name == kNoEviction) {
        evictions_.push_back(std::nullopt);
        continue;
      }
      for (const std::string& budget : flags_.budgets) {
        KVASIR_ASSIGN_OR_RETURN(
            evictions_.emplace_back(),
            compress::ParseEvictionSpec(name, budget, flags_.eviction,
                                        flags_.seed));
      }
    }
    for (const std::string& name : flags_.candidates) {
      if (compress::IsBaselineName(name)) continue;
      KVASIR_ASSIGN_OR_RETURN(const compress::PlannedName planned,
                              compress::ParsePlannedName(name));
      const absl::StatusOr<model::Checkpoint> checkpoint =
          model::Checkpoint::Open(planned.folder);
      if (!checkpoint.ok()) {
        return absl::Status(
            checkpoint.status().code(),
            absl::StrCat(name, ": ", checkpoint.status().message(),
                         "; baselines begin with ",
                         compress::BaselineMethods()));
      }
      KVASIR_RETURN_IF_ERROR(Named(name, CheckEvictions(planned, *checkpoint)));
    }
    return absl::OkStatus();
  }

  absl::Status CheckEvictions(const compress::PlannedName& name,
                              const model::Checkpoint& checkpoint) const {
    KVASIR_ASSIGN_OR_RETURN(const std::optional<kvasir::v1::KvPlan> plan,
                            PlanOf(name, checkpoint));
    const plan::AttentionShape shape =
        model::AttentionShapeOf(checkpoint.spec());
    for (const std::optional<compress::EvictionSpec>& spec : evictions_) {
      if (!spec.has_value()) continue;
      KVASIR_RETURN_IF_ERROR(Named(
          spec->name, compress::EvictingPlan(*spec, plan, {}, shape).status()));
    }
    return absl::OkStatus();
  }

  static absl::Status Named(const std::string& name,
                            const absl::Status& status) {
    if (status.ok()) return status;
    return absl::Status(status.code(),
                        absl::StrCat(name, ": ", status.message()));
  }

  // Makes the baselines, which need the loaded teacher, so that their errors
  // are found before the teacher runs.
  absl::Status MakeBaselines() {
    for (const std::string& name : flags_.candidates) {
      if (!compress::IsBaselineName(name) || baselines_.contains(name)) {
        continue;
      }
      KVASIR_ASSIGN_OR_RETURN(
          compress::Baseline baseline,
          compress::MakeBaseline(
              {.name = name,
               .decoder = teacher_.decoder.get(),
               .calibration_ids = calibration_ids_,
               .threads = compress::ThreadsFor(device_, flags_.threads),
               .oscar_sums = &oscar_sums_}));
      for (const std::optional<compress::EvictionSpec>& spec : evictions_) {
        if (!spec.has_value()) continue;
        KVASIR_RETURN_IF_ERROR(
            Named(absl::StrCat(name, ": ", spec->name),
                  compress::Evicting(baseline.candidate, *spec).status()));
      }
      baselines_.emplace(name, std::move(baseline));
    }
    return absl::OkStatus();
  }

  compress::EvaluateOptions Options() {
    compress::EvaluateOptions options;
    options.window_tokens = flags_.window_tokens;
    if (flags_.windows > 0) {
      options.min_windows = flags_.windows;
      options.max_windows = flags_.windows;
    }
    if (flags_.repeat_test) {
      options.repeat = {.tests = flags_.repeats,
                        .passage_tokens = flags_.repeat_tokens,
                        .filler_tokens = flags_.filler_tokens};
    } else {
      options.repeat.tests = 0;
    }
    options.key_error_windows = flags_.key_error_windows;
    options.threads = compress::ThreadsFor(device_, flags_.threads);
    options.progress = [this](int64_t done, int64_t total) {
      if (!line_) line_.emplace(label_, total, "windows", !flags_.quiet);
      line_->Update(done);
      return !StopAsked();
    };
    return options;
  }

  void EndLine() { line_.reset(); }

  absl::Status EvaluateOne(const std::string& name) {
    if (compress::IsBaselineName(name)) {
      return EvaluateEvictions(baselines_.at(name).candidate);
    }
    KVASIR_ASSIGN_OR_RETURN(const compress::PlannedName planned,
                            compress::ParsePlannedName(name));
    const absl::StatusOr<LoadedModel> model = LoadModel(planned, device_);
    KVASIR_RETURN_IF_ERROR(Named(name, model.status()));
    KVASIR_ASSIGN_OR_RETURN(
        const Candidate candidate,
        compress::MakeCandidate(model->name, *model->decoder));
    return EvaluateEvictions(candidate);
  }

  absl::Status EvaluateEvictions(const Candidate& candidate) {
    for (const std::optional<compress::EvictionSpec>& spec : evictions_) {
      EndLine();
      if (!spec.has_value()) {
        KVASIR_RETURN_IF_ERROR(AddRow(candidate));
        continue;
      }
      KVASIR_ASSIGN_OR_RETURN(const compress::EvictingCandidate evicting,
                              compress::Evicting(candidate, *spec));
      label_ = evicting.candidate.model;
      KVASIR_RETURN_IF_ERROR(AddRow(evicting.candidate));
    }
    return absl::OkStatus();
  }

  absl::Status AddRow(const Candidate& candidate) {
    KVASIR_ASSIGN_OR_RETURN(EvaluationRow row, evaluator_->Evaluate(candidate));
    report_->rows.push_back(std::move(row));
    return WriteReport();
  }

  const EvaluateFlags& flags_;
  at::Device device_ = at::kCPU;
  LoadedModel teacher_;
  at::Tensor calibration_ids_;
  std::vector<compress::OscarSums> oscar_sums_;  // of the calibration text
  std::vector<std::optional<compress::EvictionSpec>> evictions_;
  std::map<std::string, compress::Baseline> baselines_;
  std::unique_ptr<Evaluator> evaluator_;
  std::optional<Evaluation> report_;  // set once the teacher is measured
  std::string label_;
  std::optional<Progress> line_;
};

}  // namespace

void AddEvaluateCommand(CLI::App* app, int* exit_code) {
  auto flags = std::make_shared<EvaluateFlags>();
  flags->threads = base::ReadMachineLimits().cpus;
  CLI::App* command = app->add_subcommand(
      "evaluate", "Compares compressed models with their teacher on a text");
  command->group("Commands");
  auto add = [&](const char* name, auto& value, const char* help) {
    return AddFlag(command, name, value, help);
  };
  AddModelFlag(command, "--teacher", flags->teacher,
               absl::StrCat("Folder of the uncompressed model", kOrKnownModel))
      ->required();
  command
      ->add_option("candidate", flags->candidates,
                   "Folders of compressed models, or baselines: rotated:k4,v4, "
                   "per-token:k4,v4, ggml:kq8_0,vq4_0, fp8:e4m3, "
                   "kivi:2,group=32,residual=128, oscar:2, per-channel:k3.pre, "
                   "think:0.5,4, low-rank:160/1024; each with sinks=4, "
                   "window=128 or skip=2 for tokens and layers that stay "
                   "exact; FOLDER:sinks=4,window=128 sets those tokens of a "
                   "compressed model with codes")
      ->transform(ModelName(command, OtherNames::kAllowed))
      ->required();
  add("--text", flags->text,
      "Text that was used neither for calibration nor for training")
      ->required();
  AddModelFlag(command, "--tokenizer", flags->tokenizer,
               "Folder of the tokenizer (default: the teacher's)");
  add("--windows", flags->windows,
      "Number of windows (0: as many as the text has)")
      ->check(AtLeast(0));
  add("--window-tokens", flags->window_tokens, "Number of tokens in a window")
      ->check(AtLeast(2));
  AddSwitch(command, "--repeat-test", flags->repeat_test,
            "Also measure the loss on the second copy of a passage, far from "
            "the first");
  add("--repeats", flags->repeats, "Number of passages of the repeat test")
      ->check(Above(0));
  add("--repeat-tokens", flags->repeat_tokens,
      "Number of tokens in a passage (0: 128, or fewer if the context is "
      "short)")
      ->check(AtLeast(0));
  add("--filler-tokens", flags->filler_tokens,
      "Number of tokens between the copies (0: 512, or fewer if the "
      "context is short)")
      ->check(AtLeast(0));
  add("--key-error-windows", flags->key_error_windows,
      "Number of windows in which keys are compared with the teacher's")
      ->check(AtLeast(0));
  add("--eviction", flags->evictions,
      "Evictions to measure on each candidate, with each window as one "
      "prompt: none, q-hitter, h2o, streaming, recent or random")
      ->delimiter(',')
      ->allow_extra_args(false);  // the next argument is a candidate
  add("--eviction-budget", flags->budgets,
      "Eviction budgets, each measured in a row of its own: a share of "
      "the window (0.2), or a number of slots")
      ->delimiter(',')
      ->allow_extra_args(false);
  AddEvictionSettings(command, flags->eviction);
  add("--calibration-text", flags->calibration_text,
      "Text for the ranges of per-channel baselines and the rotations of "
      "oscar");
  add("--calibration-tokens", flags->calibration_tokens,
      "Number of tokens of --calibration-text")
      ->check(Above(0));
  add("--seed", flags->seed, "Seed of the random choice of these tokens");
  add("--json", flags->json,
      "File to write the result to, after every candidate, for kvasir inspect "
      "--evaluation");
  AddDeviceFlag(command, flags->device);
  add("--threads", flags->threads, "CPU threads")->check(Above(0));
  AddSwitch(command, "--quiet", flags->quiet, "Print no progress");
  command->callback([flags, exit_code] {
    if (std::all_of(flags->evictions.begin(), flags->evictions.end(),
                    [](const auto& name) { return name == kNoEviction; })) {
      const absl::Status used =
          CheckEvictionIsUsed({.budget = absl::StrJoin(flags->budgets, ","),
                               .settings = flags->eviction});
      if (!used.ok()) throw CLI::ValidationError(std::string(used.message()));
    }
    Report(EvaluateRun(*flags).Run(), exit_code);
  });
}

}  // namespace kvasir::cli
