#include "worker/load/model_options.h"

#include "absl/strings/str_cat.h"
#include "base/cli/flags.h"
#include "base/status_macros.h"
#include "model/known_models.h"

namespace kvasir::cli {

void AddModelFlags(CLI::App* app, ModelOptions* options) {
  AddModelFlag(
      app, "--model", options->model,
      absl::StrCat("folder of a Hugging Face checkpoint, or a GGUF file",
                   kOrKnownModel))
      ->type_name("DIR|GGUF");
  AddSwitch(app, "--random-weights", options->random_weights,
            "run a model of --shape with random weights, made in memory");
  AddFlag(app, "--shape", options->shape,
          "with --random-weights: tinyllama-1.1b, llama-3-8b, ...")
      ->check(ShapeName());
  AddFlag(app, "--weights-seed", options->weights_seed,
          "with --random-weights: the seed");
  AddFlag(
      app, "--kv-plan", options->kv_plan,
      "compression plan: a file, used instead of the folder's kv_plan.json, or "
      "a plan that any unchanged model can use: dense-bf16, dense-8bit, "
      "rotated-4bit, rotated-3bit; auto: a server measures these plans and "
      "takes the one of fewest bytes that hardly changes the model, unless "
      "the folder has a plan (other commands: as if --kv-plan was not given). "
      "For long texts in little memory, rotated-k3v2 (keys of 3 bits, values "
      "of 2) and rotated-2bit: they change most models, so measure them first "
      "with check-plan --text")
      ->type_name("FILE|NAME|auto");
  AddFlag(app, "--kv-dtype", options->kv_dtype,
          "type of cached numbers if no plan sets it; auto: the weights' type")
      ->check(CLI::IsMember({"auto", "f32", "f16", "bf16"}));
  AddFlag(app, "--page-tokens", options->page_tokens, "slots in a cache page")
      ->check(CLI::IsMember({16, 32, 64, 128}));
  AddFlag(app, "--threads", options->threads,
          "compute threads; 0: as many as the cgroup allows")
      ->check(CLI::Range(0, 1024));
  AddSwitch(app, "--deterministic", options->deterministic,
            "give a request the same bits whatever the prefix cache holds and "
            "whatever else runs: prompts lift no latents, and a GPU uses "
            "slower kernels for products and for prompts");
  AddSwitch(app, "--no-key-means", options->no_key_means,
            "do not measure the means of keys when the model is loaded; codes "
            "of keys then contain the mean, which makes them less accurate");
  AddEvictionFlags(app, options->eviction, /*of_plan=*/true);
}

std::vector<std::string> ModelArguments(const CLI::App& command,
                                        const ModelOptions& options) {
  CLI::App known;
  ModelOptions ignored;
  AddModelFlags(&known, &ignored);
  std::vector<std::string> arguments;
  for (const CLI::Option* option : command.get_options()) {
    if (option->get_lnames().empty() || option->results().empty()) continue;
    const std::string flag = "--" + option->get_lnames().front();
    if (known.get_option_no_throw(flag) == nullptr) continue;
    arguments.push_back(absl::StrCat(flag, "=", option->results().back()));
  }
  if (options.random_weights && command.count("--random-weights") == 0) {
    arguments.push_back("--random-weights");
  }
  if (!options.shape.empty() && command.count("--shape") == 0) {
    arguments.push_back(absl::StrCat("--shape=", options.shape));
  }
  return arguments;
}

absl::Status CheckFlagsAreUsed(const ModelOptions& options,
                               const std::string& endpoint) {
  KVASIR_RETURN_IF_ERROR(CheckEvictionIsUsed(options.eviction));
  if (!endpoint.empty() && !options.eviction.method.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--eviction ", options.eviction.method,
                     " applies only to a model that this command runs itself; "
                     "the server at ",
                     endpoint, " keeps the eviction that it was started with"));
  }
  if (options.shape.empty() || options.random_weights) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "--shape ", options.shape, " is used only with --random-weights: give ",
      options.model.empty() ? "that flag too" : "no --shape beside --model"));
}

absl::Status CheckModelOptions(const ModelOptions& options) {
  KVASIR_RETURN_IF_ERROR(CheckFlagsAreUsed(options));
  if (options.random_weights) {
    if (!options.model.empty()) {
      return absl::InvalidArgumentError(
          "--model and --random-weights cannot be given together");
    }
    if (options.shape.empty()) {
      return absl::InvalidArgumentError("--random-weights needs --shape");
    }
    return absl::OkStatus();
  }
  if (options.model.empty()) {
    return absl::InvalidArgumentError(
        "no model: give --model DIR, or --random-weights --shape NAME");
  }
  return absl::OkStatus();
}

void RequireModel(const ModelOptions& options) {
  const absl::Status status = CheckModelOptions(options);
  if (!status.ok()) {
    throw CLI::ValidationError(std::string(status.message()));
  }
}

}  // namespace kvasir::cli
