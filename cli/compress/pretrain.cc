// `kvasir-compress pretrain`: a small model from a text.
#include "compress/train/pretrain.h"

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/machine.h"
#include "base/status_macros.h"
#include "cli/compress/commands.h"
#include "cli/compress/shape_flags.h"
#include "cli/flags.h"
#include "compress/artifact/hf_config.h"
#include "compress/calibrate/token_stream.h"
#include "compress/runtime/cpu_setup.h"
#include "compress/runtime/device.h"
#include "model/shapes/shapes.h"
#include "model/tokenizer/tokenizer.h"
#include "nlohmann/json.hpp"

namespace kvasir::cli {
namespace {

using compress::PretrainOptions;
using compress::PretrainProgress;
using compress::PretrainResult;
using compress::RampStage;
using compress::TokenStream;

struct PretrainFlags {
  ShapeFlags shape;
  std::string text;
  std::string validation_text;
  std::string tokenizer;
  std::string crops = "512";
  std::string optimizer = "muon";
  PretrainOptions options;
  bool json = false;
  bool quiet = false;
};

// "256,512@0.65,1024@0.88": crops of 512 tokens from 65 % of the run on.
absl::StatusOr<std::vector<RampStage>> ParseRamp(const std::string& text) {
  std::vector<RampStage> ramp;
  for (const std::string& part :
       std::vector<std::string>(absl::StrSplit(text, ','))) {
    const std::vector<std::string> fields = absl::StrSplit(part, '@');
    RampStage stage;
    const bool parsed =
        fields.size() <= 2 && absl::SimpleAtoi(fields[0], &stage.crop_tokens) &&
        (fields.size() == 1 || absl::SimpleAtod(fields[1], &stage.begin));
    const double least = ramp.empty() ? 0.0 : ramp.back().begin;
    if (!parsed || stage.begin < least || stage.begin >= 1.0 ||
        std::isnan(stage.begin)) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", part,
                       "' is no stage: want TOKENS or TOKENS@FRACTION, with "
                       "fractions that rise within [0, 1)"));
    }
    ramp.push_back(stage);
  }
  return ramp;
}

// One line every ten seconds, and each measurement on the validation text.
class ProgressLines {
 public:
  void Show(const PretrainProgress& progress) {
    const absl::Time now = absl::Now();
    const bool measured = progress.validation >= 0.0;
    if (!measured && now - last_line_ < absl::Seconds(10)) return;
    last_line_ = now;
    std::string line = absl::StrFormat(
        "pretrain: step %d, %.1f %%, loss %.4f, lr %.2e, crops %d, %d tokens, "
        "%.0f tokens/s, left %s",
        progress.step, 100.0 * progress.fraction, progress.loss,
        progress.learning_rate, progress.crop_tokens, progress.tokens_seen,
        progress.tokens_per_second,
        absl::FormatDuration(absl::Trunc(progress.left, absl::Seconds(1))));
    if (measured) {
      absl::StrAppendFormat(&line, ", validation %.4f nats/byte",
                            progress.validation);
    }
    absl::FPrintF(stderr, "%s\n", line);
  }

 private:
  absl::Time last_line_ = absl::InfinitePast();
};

void PrintResult(const PretrainFlags& flags, const PretrainResult& result) {
  if (flags.json) {
    const nlohmann::ordered_json object = {
        {"steps", result.steps},
        {"tokens", result.tokens_seen},
        {"seconds", absl::ToDoubleSeconds(result.elapsed)},
        {"loss", result.last_loss},
        {"nats_per_byte", result.validation_nats_per_byte},
        {"nats_per_token", result.validation_nats_per_token},
        {"out", flags.options.out.string()}};
    absl::PrintF("%s\n", object.dump());
    return;
  }
  absl::PrintF("%d steps, %d tokens, %.0f s, loss %.4f", result.steps,
               result.tokens_seen, absl::ToDoubleSeconds(result.elapsed),
               result.last_loss);
  if (result.validation_nats_per_byte >= 0.0) {
    absl::PrintF(", validation %.4f nats/byte (%.4f nats/token)",
                 result.validation_nats_per_byte,
                 result.validation_nats_per_token);
  }
  absl::PrintF(": %s\n", flags.options.out.string());
}

absl::Status RunPretrain(PretrainFlags& flags) {
  PretrainOptions& options = flags.options;
  KVASIR_ASSIGN_OR_RETURN(options.shape, ShapeOf(flags.shape));
  KVASIR_ASSIGN_OR_RETURN(options.ramp, ParseRamp(flags.crops));
  options.muon = flags.optimizer == "muon";
  KVASIR_RETURN_IF_ERROR(compress::CheckDevice(options.device));
  KVASIR_ASSIGN_OR_RETURN(const std::unique_ptr<model::Tokenizer> tokenizer,
                          model::Tokenizer::Load(flags.tokenizer));
  options.shape.vocab_size = tokenizer->vocab_size();
  if (!tokenizer->bos_id() || tokenizer->eos_ids().empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        flags.tokenizer, ": tokenizer_config.json names no bos or eos token"));
  }
  options.shape.bos_token_id = *tokenizer->bos_id();
  options.shape.eos_token_id = tokenizer->eos_ids().front();
  KVASIR_ASSIGN_OR_RETURN(
      const TokenStream train,
      compress::EncodeFile(flags.text, *tokenizer, options.threads));
  TokenStream validation;
  if (!flags.validation_text.empty()) {
    KVASIR_ASSIGN_OR_RETURN(
        validation, compress::EncodeFile(flags.validation_text, *tokenizer,
                                         options.threads));
  }
  if (!flags.quiet) {
    absl::FPrintF(stderr, "pretrain: %d parameters, %d tokens of text\n",
                  model::CountParameters(options.shape), train.ids.size());
  }
  KVASIR_RETURN_IF_ERROR(compress::CopyTokenizer(flags.tokenizer, options.out));
  compress::SetBlasThreads(1);
  compress::KeepFreedMemory();
  ProgressLines lines;
  KVASIR_ASSIGN_OR_RETURN(
      const PretrainResult result,
      compress::Pretrain(options, train, validation,
                         [&](const PretrainProgress& progress) {
                           if (!flags.quiet) lines.Show(progress);
                           return !StopAsked();
                         }));
  PrintResult(flags, result);
  return absl::OkStatus();
}

}  // namespace

void AddPretrainCommand(CLI::App* app, int* exit_code) {
  auto owned = std::make_shared<PretrainFlags>();
  PretrainFlags& flags = *owned;
  flags.options.threads = base::ReadMachineLimits().cpus;
  CLI::App* command = app->add_subcommand(
      "pretrain", "Trains a small Llama model on a text, from nothing");
  command->group("Commands");
  PretrainOptions& options = flags.options;
  flags.shape.name = "kvasir-tiny";
  AddShapeFlags(command, "--shape", flags.shape);
  auto add = [&](const char* flag, auto& value, const char* help) {
    return AddFlag(command, flag, value, help);
  };
  add("--text", flags.text, "Text to train on")->required();
  add("--valid", flags.validation_text, "Text to measure on");
  add("--tokenizer", flags.tokenizer, "Folder with tokenizer.json")->required();
  add("--out", options.out, "Folder to write the checkpoint into")->required();
  AddDuration(command, "--time-budget", options.time_budget,
              "Train for this long (60m); the schedules end with it");
  add("--steps", options.steps, "Train for so many steps, instead")
      ->check(AtLeast(0));
  add("--seed", options.seed, "Seed of weights and order");
  add("--batch", options.batch_tokens, "Tokens per step")->check(Above(0));
  add("--micro-batch", options.micro_batch_tokens,
      "Tokens that a thread works on at a time")
      ->check(Above(0));
  add("--seq-len", flags.crops,
      "Crop length, or a ramp of them: 256,512@0.65,1024@0.88")
      ->check(Checked(
          [](const std::string& text) { return ParseRamp(text).status(); }));
  add("--lr", options.learning_rate, "Peak learning rate")->check(Above(0));
  add("--warmup", options.warmup, "Fraction of the run that warms up")
      ->check(CLI::Range(0.0, 0.9));
  add("--weight-decay", options.weight_decay, "On matrices")->check(AtLeast(0));
  add("--clip", options.clip_norm, "Largest norm of a gradient")
      ->check(Above(0));
  add("--optimizer", flags.optimizer, "muon or adamw")
      ->check(CLI::IsMember({"muon", "adamw"}));
  AddDeviceFlag(command, options.device);
  add("--threads", options.threads, "CPU threads")->check(Above(0));
  AddDuration(command, "--validate-every", options.validation_interval,
              "Time between samples of the validation text");
  AddDuration(command, "--checkpoint-every", options.checkpoint_interval,
              "Time between saved states");
  AddSwitch(command, "--resume", options.resume,
            "Go on from the state that a stopped run left in --out; only the "
            "length of the run may be changed");
  AddSwitch(command, "--json", flags.json, "Print the result as JSON");
  AddSwitch(command, "--quiet", flags.quiet, "No progress");
  command->callback([owned, exit_code] {
    const PretrainOptions& asked = owned->options;
    const bool timed = asked.time_budget > absl::ZeroDuration();
    if (timed == (asked.steps > 0)) {
      throw CLI::ValidationError("give one of --steps and --time-budget");
    }
    Report(RunPretrain(*owned), exit_code);
  });
}

}  // namespace kvasir::cli
