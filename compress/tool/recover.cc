// `kvasir-compress recover`: trains a compressed model to win back quality that
// compression lost.
#include "compress/train/recover.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/cli/flags.h"
#include "base/cli/progress.h"
#include "base/cli/units.h"
#include "base/log.h"
#include "base/machine.h"
#include "base/status_macros.h"
#include "compress/apply/range_collector.h"
#include "compress/artifact/checkpoint_folder.h"
#include "compress/calibrate/calibration_sample.h"
#include "compress/calibrate/token_stream.h"
#include "compress/evaluate/evaluate.h"
#include "compress/oracle/reference_decoder.h"
#include "compress/runtime/cpu_setup.h"
#include "compress/runtime/device.h"
#include "compress/tensors/served_model.h"
#include "compress/tool/commands.h"
#include "compress/train/recover_ranges.h"
#include "compress/train/recover_writer.h"
#include "model/checkpoint/checkpoint.h"
#include "model/known_models.h"
#include "model/tokenizer/tokenizer.h"
#include "nlohmann/json.hpp"
#include "plan/plan.h"

namespace kvasir::cli {
namespace {

using compress::Candidate;
using compress::EvaluateOptions;
using compress::EvaluationRow;
using compress::Evaluator;
using compress::Recovered;
using compress::RecoverOptions;
using compress::RecoverProgress;
using compress::ReferenceDecoder;
using compress::TokenStream;

struct RecoverFlags {
  std::string model;
  std::string teacher;
  std::string text;
  std::string validation_text;
  std::filesystem::path out;
  std::string device = "auto";
  RecoverOptions options;
  bool overwrite = false;
  bool json = false;
  bool quiet = false;
};

// The opened and checked inputs of the command.
struct Inputs {
  std::optional<model::Checkpoint> model;
  std::optional<kvasir::v1::KvPlan> plan;
  std::optional<model::Checkpoint> teacher;
  TokenStream text;
  std::optional<compress::EvaluationText> validation;
};

// The student's loss on the validation text before and after the recovery,
// compared with the teacher's.
struct Comparison {
  EvaluationRow before;
  EvaluationRow after;
};

absl::Status OpenModels(const RecoverFlags& flags, Inputs& inputs) {
  KVASIR_ASSIGN_OR_RETURN(model::Checkpoint model,
                          model::Checkpoint::Open(flags.model));
  KVASIR_RETURN_IF_ERROR(compress::CheckMethodsServe(model.spec()));
  KVASIR_ASSIGN_OR_RETURN(model::Checkpoint teacher,
                          model::Checkpoint::Open(flags.teacher));
  for (const model::Checkpoint* const checkpoint : {&model, &teacher}) {
    if (!checkpoint->is_gguf()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(checkpoint->folder(),
                     " is a GGUF file; give a Hugging Face folder, as kvasir "
                     "convert writes it"));
  }
  if (teacher.kv_plan_json().has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat(flags.teacher, " has a ", compress::kPlanFile,
                     ": the teacher must be the uncompressed checkpoint that "
                     "the model was made from"));
  }
  if (model.kv_plan_json().has_value()) {
    KVASIR_ASSIGN_OR_RETURN(
        inputs.plan, plan::ParsePlanJson(*model.kv_plan_json(),
                                         (std::filesystem::path(flags.model) /
                                          compress::kPlanFile)
                                             .string()));
  }
  KVASIR_RETURN_IF_ERROR(compress::CheckTeacher(model.spec(), teacher.spec()));
  inputs.model.emplace(std::move(model));
  inputs.teacher.emplace(std::move(teacher));
  return absl::OkStatus();
}

absl::Status ReadTexts(RecoverFlags& flags, Inputs& inputs) {
  KVASIR_ASSIGN_OR_RETURN(const std::unique_ptr<model::Tokenizer> tokenizer,
                          model::Tokenizer::Load(flags.model));
  KVASIR_ASSIGN_OR_RETURN(
      inputs.text,
      compress::EncodeFile(flags.text, *tokenizer, flags.options.threads));
  if (!flags.validation_text.empty()) {
    KVASIR_ASSIGN_OR_RETURN(
        inputs.validation,
        compress::ReadEvaluationText(flags.validation_text, *tokenizer,
                                     flags.options.threads));
  }
  KVASIR_ASSIGN_OR_RETURN(flags.options.start_token,
                          compress::StartToken(*tokenizer));
  return absl::OkStatus();
}

void PrintStart(const RecoverFlags& flags, const Inputs& inputs) {
  const compress::RecoverMemory memory =
      compress::EstimateRecoverMemory(inputs.model->spec(), flags.options);
  absl::FPrintF(
      stderr,
      "recover: %d tokens of text, each read %.1f times; about %s of "
      "memory, of which %s for the two models\n",
      inputs.text.ids.size(),
      static_cast<double>(flags.options.steps * flags.options.batch_tokens) /
          static_cast<double>(inputs.text.ids.size()),
      HumanBytes(
          static_cast<double>(memory.weights_bytes + memory.training_bytes)),
      HumanBytes(static_cast<double>(memory.weights_bytes)));
}

nlohmann::ordered_json ToJson(const EvaluationRow& row) {
  return {{"nats_per_token", row.nats_per_token},
          {"nats_per_byte", row.nats_per_byte},
          {"added_nats_per_token", row.added_nats_per_token},
          {"added_low", row.added_low},
          {"added_high", row.added_high},
          {"top1_agreement", row.top1_agreement},
          {"kl_nats", row.kl_nats}};
}

void PrintResult(const RecoverFlags& flags, const Recovered& recovered,
                 const std::optional<Comparison>& comparison) {
  if (flags.json) {
    nlohmann::ordered_json object = {
        {"steps", recovered.steps},
        {"tokens", recovered.tokens_seen},
        {"seconds", absl::ToDoubleSeconds(recovered.elapsed)},
        {"trained_parameters", recovered.trained_parameters},
        {"first_loss", recovered.first_loss},
        {"last_loss", recovered.last_loss}};
    if (comparison.has_value()) {
      object["before"] = ToJson(comparison->before);
      object["after"] = ToJson(comparison->after);
    }
    object["out"] = flags.out.string();
    absl::PrintF("%s\n", object.dump());
    return;
  }
  absl::PrintF("%d steps, %d tokens, %.0f s, %d parameters", recovered.steps,
               recovered.tokens_seen, absl::ToDoubleSeconds(recovered.elapsed),
               recovered.trained_parameters);
  if (comparison.has_value()) {
    absl::PrintF(
        "; on the validation text %+.4f nats/token against the teacher before, "
        "%+.4f after",
        comparison->before.added_nats_per_token,
        comparison->after.added_nats_per_token);
  }
  absl::PrintF(": %s\n", base::Printable(flags.out.string()));
}

// Returns the student with the recovered weights.
absl::StatusOr<ReferenceDecoder> WithWeights(
    const ReferenceDecoder& student,
    const std::vector<compress::TensorMap>& layers) {
  ReferenceDecoder::Parts parts{
      student.spec(), student.plan(), student.outer(), {}};
  for (size_t l = 0; l < layers.size(); ++l) {
    compress::TensorMap tensors = student.layer(static_cast<int64_t>(l));
    for (const auto& [name, tensor] : layers[l]) tensors[name] = tensor;
    parts.layers.push_back(std::move(tensors));
  }
  return ReferenceDecoder::FromTensors(std::move(parts),
                                       {.device = student.device()});
}

absl::StatusOr<EvaluationRow> Compare(const Evaluator& evaluator,
                                      const std::string& name,
                                      const ReferenceDecoder& decoder) {
  KVASIR_ASSIGN_OR_RETURN(const Candidate candidate,
                          compress::MakeCandidate(name, decoder));
  return evaluator.Evaluate(candidate);
}

absl::StatusOr<Recovered> Train(const RecoverFlags& flags, const Inputs& inputs,
                                const ReferenceDecoder& student,
                                const ReferenceDecoder& teacher) {
  Progress bar("recover", flags.options.steps, "steps", !flags.quiet);
  KVASIR_ASSIGN_OR_RETURN(
      Recovered recovered,
      compress::Recover(student, teacher, inputs.text, flags.options,
                        [&bar](const RecoverProgress& progress) {
                          bar.Update(
                              progress.step,
                              absl::StrFormat(
                                  "cross entropy %.4f, divergence %.4f, "
                                  "%.0f tokens/s",
                                  progress.cross_entropy, progress.divergence,
                                  progress.tokens_per_second));
                          return !StopAsked();
                        }));
  KVASIR_RETURN_IF_ERROR(
      compress::RoundToStored(*inputs.model, recovered.layers));
  if (recovered.steps > 0 && inputs.plan.has_value() &&
      compress::RangeCollector::IsNeeded(*inputs.plan)) {
    compress::SampleOptions options{
        .sequence_tokens = flags.options.crop_tokens,
        .seed = flags.options.adapters.seed};
    // Never samples more tokens than the text has, so that any text that is
    // long enough for training is accepted here.
    options.tokens =
        std::min(options.tokens, static_cast<int64_t>(inputs.text.ids.size()));
    KVASIR_ASSIGN_OR_RETURN(
        const compress::CalibrationSample sample,
        compress::SampleCalibration(inputs.text, options,
                                    inputs.model->spec().vocab_size));
    KVASIR_RETURN_IF_ERROR(compress::RenewRanges(*inputs.model, *inputs.plan,
                                                 sample, flags.options.threads,
                                                 recovered.layers));
  }
  return recovered;
}

absl::Status CheckOutput(const RecoverFlags& flags) {
  const std::array<std::filesystem::path, 2> inputs = {flags.model,
                                                       flags.teacher};
  return compress::NewFolder::Check(flags.out, flags.overwrite, inputs);
}

absl::Status RunRecover(RecoverFlags& flags) {
  KVASIR_ASSIGN_OR_RETURN(const at::Device device,
                          compress::OpenDevice(flags.device));
  KVASIR_RETURN_IF_ERROR(CheckOutput(flags));
  Inputs inputs;
  KVASIR_RETURN_IF_ERROR(OpenModels(flags, inputs));
  KVASIR_RETURN_IF_ERROR(ReadTexts(flags, inputs));
  if (!flags.quiet) PrintStart(flags, inputs);
  compress::SetBlasThreads(1);
  compress::KeepFreedMemory();
  KVASIR_ASSIGN_OR_RETURN(
      const ReferenceDecoder student,
      ReferenceDecoder::Load(*inputs.model, inputs.plan, {.device = device}));
  KVASIR_ASSIGN_OR_RETURN(const ReferenceDecoder teacher,
                          ReferenceDecoder::Load(*inputs.teacher, std::nullopt,
                                                 {.device = device}));
  std::unique_ptr<Evaluator> evaluator;
  std::optional<Comparison> comparison;
  if (inputs.validation.has_value()) {
    KVASIR_ASSIGN_OR_RETURN(const Candidate candidate,
                            compress::MakeCandidate("teacher", teacher));
    EvaluateOptions options;
    // A confidence interval needs two windows, so windows are shorter if the
    // text is short.
    const auto tokens = static_cast<int64_t>(inputs.validation->ids.size());
    options.window_tokens =
        std::min({options.window_tokens, teacher.spec().max_position_embeddings,
                  tokens / 2});
    options.min_windows = 2;
    options.repeat.tests = 0;
    options.threads = compress::ThreadsFor(device, flags.options.threads);
    KVASIR_ASSIGN_OR_RETURN(
        evaluator,
        Evaluator::Create(candidate, *std::move(inputs.validation), options));
    comparison.emplace();
    KVASIR_ASSIGN_OR_RETURN(comparison->before,
                            Compare(*evaluator, "before", student));
  }
  KVASIR_ASSIGN_OR_RETURN(const Recovered recovered,
                          Train(flags, inputs, student, teacher));
  if (comparison.has_value()) {
    KVASIR_ASSIGN_OR_RETURN(const ReferenceDecoder after,
                            WithWeights(student, recovered.layers));
    KVASIR_ASSIGN_OR_RETURN(comparison->after,
                            Compare(*evaluator, "after", after));
  }
  KVASIR_RETURN_IF_ERROR(compress::WriteRecovered(
      *inputs.model, recovered.layers, flags.out, flags.overwrite));
  PrintResult(flags, recovered, comparison);
  return absl::OkStatus();
}

void AddTrainingFlags(CLI::App* command, RecoverOptions& options) {
  const auto add = [&](const char* flag, auto& value, const char* help) {
    return AddFlag(command, flag, value, help);
  };
  add("--steps", options.steps, "Steps of training")->check(AtLeast(0));
  add("--batch-tokens", options.batch_tokens, "Tokens per step")
      ->check(Above(0));
  add("--micro-batch-tokens", options.micro_batch_tokens,
      "Tokens that a thread works on at a time")
      ->check(Above(0));
  add("--crop-tokens", options.crop_tokens,
      "Number of tokens in a random window")
      ->check(AtLeast(2));
  add("--rank", options.adapters.rank, "Rank of the adapters")->check(Above(0));
  add("--alpha", options.adapters.alpha,
      "Adapters are multiplied by alpha / rank")
      ->check(Above(0));
  add("--dropout", options.adapters.dropout,
      "Share of an adapter's inputs that is dropped in each micro-batch")
      ->check(CLI::Range(0.0, 0.9));
  add("--lr", options.learning_rate, "Peak learning rate")->check(Above(0));
  add("--warmup", options.warmup,
      "Fraction of the steps in which the learning rate rises")
      ->check(CLI::Range(0.0, 0.9));
  add("--weight-decay", options.weight_decay, "Weight decay of the adapters")
      ->check(AtLeast(0));
  add("--clip", options.clip_norm,
      "Largest norm of the gradient; a larger gradient is scaled down")
      ->check(Above(0));
  add("--temperature", options.loss.temperature,
      "Softens both predictions before they are compared")
      ->check(Above(0));
  add("--kl-weight", options.loss.divergence,
      "Weight of the divergence from the teacher")
      ->check(AtLeast(0));
  add("--ce-weight", options.loss.cross_entropy,
      "Weight of the cross entropy of the text's next tokens")
      ->check(AtLeast(0));
  AddSwitch(command, "--through-codes", options.through_codes,
            "Train with coded latents instead of exact ones");
  add("--seed", options.adapters.seed,
      "Seed of the adapters, the order of crops and the dropout");
  add("--threads", options.threads, "CPU threads")->check(Above(0));
}

}  // namespace

void AddRecoverCommand(CLI::App* app, int* exit_code) {
  auto owned = std::make_shared<RecoverFlags>();
  RecoverFlags& flags = *owned;
  flags.options.threads = base::ReadMachineLimits().cpus;
  CLI::App* command = app->add_subcommand(
      "recover",
      "Trains adapters on the attention of a compressed checkpoint, with "
      "the uncompressed one as teacher, and merges them");
  command->group("Commands");
  AddModelFlag(command, "--model", flags.model,
               "Checkpoint to recover; a checkpoint without a plan is trained "
               "uncompressed")
      ->required();
  AddModelFlag(
      command, "--teacher", flags.teacher,
      absl::StrCat("The uncompressed checkpoint that the model was made from",
                   kOrKnownModel))
      ->required();
  AddFlag(command, "--text", flags.text, "Text to train on")->required();
  AddFlag(command, "--valid", flags.validation_text,
          "Text on which the loss is measured before and after the training");
  AddFlag(command, "--out", flags.out, "Folder to write")->required();
  AddSwitch(command, "--overwrite", flags.overwrite,
            "Replace the checkpoint in the folder");
  AddTrainingFlags(command, flags.options);
  AddDeviceFlag(command, flags.device);
  AddSwitch(command, "--json", flags.json, "Print the result as JSON");
  AddSwitch(command, "--quiet", flags.quiet, "Print no progress");
  command->callback(
      [owned, exit_code] { Report(RunRecover(*owned), exit_code); });
}

}  // namespace kvasir::cli
