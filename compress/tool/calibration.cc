#include "compress/tool/calibration.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/cli/flags.h"
#include "base/cli/progress.h"
#include "base/cli/units.h"
#include "base/log.h"
#include "base/machine.h"
#include "base/status_macros.h"
#include "compress/calibrate/built_in_domains.h"
#include "compress/calibrate/calibration_cost.h"
#include "compress/calibrate/token_stream.h"
#include "compress/runtime/device.h"
#include "compress/tensors/served_model.h"
#include "compress/tool/commands.h"
#include "model/known_models.h"
#include "model/tokenizer/tokenizer.h"

namespace kvasir::cli {
namespace {

using compress::CalibrateEvents;
using compress::CalibrateOptions;
using compress::CalibrateProgress;
using compress::CalibrationCost;
using compress::CalibrationSample;

constexpr int64_t kSequenceTokens = 1024;
constexpr int64_t kTokens = 16384;
// The default number of tokens if information is measured. It is large because
// a whole matrix is estimated for the keys and for the values of each layer.
constexpr int64_t kInformationTokens = 114688;
// The share of each domain's sequences that is held out, to test codes on.
constexpr double kHeldOutShare = 0.1;
// The first tokens of a sequence attract attention whatever their content;
// plans keep them exact.
constexpr int64_t kSinkTokens = 4;

// A value of the flag --text: FILE, or NAME=FILE with the name of a domain.
struct NamedText {
  std::string name;
  std::string path;
};

NamedText NameOf(const std::string& text) {
  std::error_code ignored;
  const size_t equals = text.find('=');
  if (equals == std::string::npos || equals == 0 || text.find('/') < equals ||
      std::filesystem::exists(text, ignored)) {
    return {std::filesystem::path(text).filename().string(), text};
  }
  return {text.substr(0, equals), text.substr(equals + 1)};
}

absl::StatusOr<std::vector<compress::DomainText>> ReadDomains(
    const CalibrationFlags& flags) {
  const std::string& folder =
      flags.tokenizer.empty() ? flags.model : flags.tokenizer;
  KVASIR_ASSIGN_OR_RETURN(const std::unique_ptr<model::Tokenizer> tokenizer,
                          model::Tokenizer::Load(folder));
  std::vector<compress::DomainText> domains;
  for (const std::string& text : flags.texts) {
    const NamedText named = NameOf(text);
    KVASIR_ASSIGN_OR_RETURN(
        compress::TokenStream stream,
        compress::EncodeFile(named.path, *tokenizer, flags.threads));
    domains.push_back({named.name, std::move(stream)});
  }
  if (!domains.empty()) return domains;
  for (const compress::BuiltInDomain& domain : compress::BuiltInDomains()) {
    KVASIR_ASSIGN_OR_RETURN(
        compress::TokenStream stream,
        compress::EncodeText(domain.text, *tokenizer, flags.threads));
    domains.push_back({domain.name, std::move(stream)});
  }
  return domains;
}

int64_t TokensOf(const CalibrationFlags& flags, bool information) {
  if (flags.tokens > 0) return flags.tokens;
  return information ? kInformationTokens : kTokens;
}

absl::StatusOr<CalibrationSample> ReadSample(
    const CalibrationFlags& flags, const model::Checkpoint& checkpoint,
    bool information) {
  KVASIR_ASSIGN_OR_RETURN(const std::vector<compress::DomainText> domains,
                          ReadDomains(flags));
  const model::DecoderSpec& spec = checkpoint.spec();
  compress::SampleOptions options;
  options.tokens = TokensOf(flags, information);
  options.seed = flags.seed;
  options.sequence_tokens =
      flags.sequence_tokens > 0
          ? flags.sequence_tokens
          : std::min({kSequenceTokens, spec.max_position_embeddings,
                      options.tokens / static_cast<int64_t>(domains.size())});
  if (information) {
    KVASIR_ASSIGN_OR_RETURN(
        CalibrationSample sample,
        compress::SampleDomains(domains, options, kHeldOutShare,
                                spec.vocab_size));
    sample.sink_tokens = kSinkTokens;
    return sample;
  }
  if (domains.size() > 1) {
    return compress::SampleDomains(domains, options, 0.0, spec.vocab_size);
  }
  absl::StatusOr<CalibrationSample> sample =
      compress::SampleCalibration(domains[0].text, options, spec.vocab_size);
  if (sample.ok()) return sample;
  return absl::Status(
      sample.status().code(),
      absl::StrCat(flags.texts[0], ": ", sample.status().message()));
}

// Prints the expected cost before the work begins. Returns an error if memory
// does not suffice.
absl::Status SayCost(const model::Checkpoint& checkpoint,
                     const CalibrationSample& sample,
                     const CalibrateOptions& options, bool quiet) {
  const CalibrationCost cost =
      compress::CostOfCalibration(checkpoint, sample, options);
  auto human = [](int64_t bytes) {
    return HumanBytes(static_cast<double>(bytes));
  };
  if (!quiet) {
    const compress::CalibrationTime time = compress::TimeOfCalibration(
        cost,
        compress::MeasureOperationsPerSecond(options.threads, options.device));
    absl::FPrintF(
        stderr,
        "calibration: %d tokens in %d sequences; memory up to %s (model %s, "
        "one layer %s, %s %s, sums %s); about %s",
        sample.num_tokens(), sample.num_sequences(), human(cost.peak_bytes()),
        human(cost.model_bytes), human(cost.workspace_bytes),
        options.parts.has_gradients() ? "micro-batch" : "hidden states",
        human(cost.micro_batch_bytes), human(cost.sum_bytes),
        HumanTime(time.total));
    if (options.parts.has_gradients()) {
      absl::FPrintF(stderr, ", %s of it for gradients",
                    HumanTime(time.way_back));
    }
    absl::FPrintF(stderr, "\n");
  }
  // Only the CPU's memory is checked: a GPU's allocator itself reports an error
  // when memory is exhausted.
  if (!options.device.is_cpu()) return absl::OkStatus();
  const int64_t available = base::ReadMachineLimits().available_bytes;
  if (available > 0 && cost.peak_bytes() > available) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "the calibration needs ", human(cost.peak_bytes()),
        " of memory, but only ", human(available), " are free",
        options.sequences_at_a_time() > 1
            ? "; --micro-batch 1 needs less"
            : "; shorter --sequence-tokens or fewer tokens need less"));
  }
  return absl::OkStatus();
}

}  // namespace

std::string HumanTime(absl::Duration time) {
  const double seconds = absl::ToDoubleSeconds(time);
  if (seconds < 120.0) return absl::StrFormat("%.0f s", std::max(seconds, 1.0));
  return absl::StrFormat("%.0f min", seconds / 60.0);
}

void AddCalibrationFlags(CLI::App* command, CalibrationFlags& flags) {
  constexpr char kGroup[] = "Calibration";
  flags.cache = CacheFolder();
  flags.threads = base::ReadMachineLimits().cpus;
  AddModelFlag(command, "--model", flags.model,
               absl::StrCat("Folder of the checkpoint", kOrKnownModel))
      ->required();
  AddFlag(command, "--threads", flags.threads, "CPU threads")->check(Above(0));
  AddSwitch(command, "--quiet", flags.quiet, "Print no progress");
  auto add = [&](const char* name, auto& value, const char* help) {
    return AddFlag(command, name, value, help)->group(kGroup);
  };
  add("--text", flags.texts,
      "Text to calibrate on, FILE or NAME=FILE, once for each domain: "
      "texts like those that the model will read, but not those that it "
      "is evaluated on. Without it, methods that weigh errors by "
      "information use the built-in domains books, encyclopedia, code "
      "and dialogue")
      ->type_name("[NAME=]FILE");
  AddModelFlag(command, "--tokenizer", flags.tokenizer,
               "Folder of the tokenizer (default: the model's)")
      ->group(kGroup);
  add("--calibration-tokens", flags.tokens,
      "Number of tokens, an equal share from each domain (0: 16384, or "
      "114688 if errors are weighed by information)")
      ->check(AtLeast(0));
  add("--sequence-tokens", flags.sequence_tokens,
      "Length of a sequence in tokens (0: 1024, or the model's context "
      "if that is less)")
      ->check(AtLeast(0));
  add("--seed", flags.seed, "Seed of the random choice of tokens");
  add("--labels-per-position", flags.labels_per_position,
      "For information: number of labels that are drawn from the model "
      "at each position; each label needs a backward pass")
      ->check(AtLeast(1));
  add("--micro-batch", flags.micro_batch,
      "Number of sequences that are processed at a time (0: one per "
      "thread); fewer need less memory")
      ->check(AtLeast(0));
  add("--cache", flags.cache,
      "Folder for finished calibrations and for the states of stopped "
      "ones; none: nothing is saved");
  AddDeviceFlag(command, flags.device);
}

void RecordCalibration(const CalibrationFlags& flags,
                       const CalibrationInputs& inputs,
                       kvasir::v1::KvPlan* plan) {
  if (inputs.calibration() == nullptr) return;
  auto* provenance = plan->mutable_provenance();
  provenance->set_calibration_id(inputs.calibration()->id);
  auto* settings = provenance->mutable_calibration();
  settings->mutable_texts()->Assign(flags.texts.begin(), flags.texts.end());
  const bool information = inputs.calibration()->has_information();
  settings->set_tokens(TokensOf(flags, information));
  settings->set_sequence_tokens(flags.sequence_tokens);
  settings->set_seed(flags.seed);
  settings->set_information(information);
  settings->set_labels_per_position(flags.labels_per_position);
}

void UseCalibrationOf(const kvasir::v1::KvPlan& plan, const CLI::App& command,
                      CalibrationFlags* flags, CalibrationNeeds* needs) {
  if (!plan.provenance().has_calibration()) return;
  const auto& settings = plan.provenance().calibration();
  const auto given = [&](const char* flag) { return command.count(flag) > 0; };
  if (!given("--text")) {
    flags->texts.assign(settings.texts().begin(), settings.texts().end());
  }
  if (!given("--calibration-tokens")) flags->tokens = settings.tokens();
  if (!given("--sequence-tokens")) {
    flags->sequence_tokens = settings.sequence_tokens();
  }
  if (!given("--seed")) flags->seed = settings.seed();
  if (!given("--labels-per-position")) {
    flags->labels_per_position =
        static_cast<decltype(flags->labels_per_position)>(
            settings.labels_per_position());
  }
  if (needs->statistics) needs->parts.information |= settings.information();
  if (!flags->quiet && (needs->statistics || needs->sample)) {
    absl::FPrintF(stderr,
                  "calibration: with the settings of the plan's calibration "
                  "%s, except for flags that are given (%d tokens, %s)\n",
                  plan.provenance().calibration_id(), flags->tokens,
                  flags->texts.empty()
                      ? "the built-in domains"
                      : base::Printable(absl::StrJoin(flags->texts, ", ")));
  }
}

absl::StatusOr<model::Checkpoint> OpenBase(const CalibrationFlags& flags) {
  KVASIR_RETURN_IF_ERROR(compress::CheckDevice(flags.device));
  absl::StatusOr<model::Checkpoint> checkpoint =
      model::Checkpoint::Open(flags.model);
  if (!checkpoint.ok()) {
    return absl::Status(
        checkpoint.status().code(),
        absl::StrCat("--model: ", checkpoint.status().message()));
  }
  if (checkpoint->is_gguf()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--model: ", flags.model,
        " is a GGUF file; give a Hugging Face folder, as kvasir convert writes "
        "it"));
  }
  const absl::Status served = compress::CheckMethodsServe(checkpoint->spec());
  if (!served.ok()) {
    return absl::Status(served.code(),
                        absl::StrCat("--model: ", served.message()));
  }
  if (checkpoint->kv_plan_json().has_value()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--model: ", flags.model,
        " is already compressed (it has a kv_plan.json); give the checkpoint "
        "it was made from"));
  }
  return checkpoint;
}

absl::StatusOr<CalibrationInputs> PrepareCalibration(
    const CalibrationFlags& flags, const model::Checkpoint& checkpoint,
    const CalibrationNeeds& needs) {
  CalibrationInputs inputs;
  if (!needs.sample && !needs.statistics) return inputs;
  const bool information = needs.parts.information;
  if (flags.texts.empty() && !information) {
    return absl::InvalidArgumentError(
        "a calibration text is needed: give --text FILE");
  }
  KVASIR_ASSIGN_OR_RETURN(inputs.sample,
                          ReadSample(flags, checkpoint, information));
  if (!needs.statistics) return inputs;

  CalibrateOptions options;
  options.parts = needs.parts;
  options.parts.labels_per_position = flags.labels_per_position;
  KVASIR_ASSIGN_OR_RETURN(options.device, compress::OpenDevice(flags.device));
  options.threads = compress::ThreadsFor(options.device, flags.threads);
  options.micro_batch = flags.micro_batch;
  if (flags.cache != "none") options.cache = flags.cache;
  std::optional<Progress> line;
  CalibrateEvents events;
  events.on_start = [&] {
    return SayCost(checkpoint, *inputs.sample, options, flags.quiet);
  };
  events.on_progress = [&](const CalibrateProgress& progress) {
    if (!line) {
      line.emplace("calibration", progress.total, "layer passes", !flags.quiet);
    }
    line->Update(progress.done);
    return !StopAsked();
  };
  events.on_message = [&](const std::string& message) {
    if (line) line->Finish();
    absl::FPrintF(stderr, "kvasir-compress: %s\n", message);
  };
  KVASIR_ASSIGN_OR_RETURN(
      inputs.run,
      compress::Calibrate(checkpoint, *inputs.sample, options, events));
  if (line) line->Finish();
  const compress::CalibrationRun& run = *inputs.run;
  if (!flags.quiet && run.from_cache) {
    absl::FPrintF(stderr, "calibration: %s, from the cache\n",
                  run.calibration.id);
  } else if (!flags.quiet) {
    absl::FPrintF(stderr, "calibration: %s, %.1f s", run.calibration.id,
                  absl::ToDoubleSeconds(run.elapsed));
    if (options.parts.has_gradients()) {
      absl::FPrintF(stderr, " (gradients %.0f %%), mean loss %.4f nats",
                    100.0 * absl::FDivDuration(run.way_back, run.elapsed),
                    run.loss);
    }
    absl::FPrintF(stderr, "\n");
  }
  return inputs;
}

}  // namespace kvasir::cli
