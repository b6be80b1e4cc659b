// `kvasir-compress init`: writes checkpoints of random weights.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/cli/flags.h"
#include "base/cli/progress.h"
#include "base/log.h"
#include "base/machine.h"
#include "base/status_macros.h"
#include "compress/artifact/random_checkpoint.h"
#include "compress/tool/commands.h"
#include "model/checkpoint/random_weights.h"
#include "model/known_models.h"
#include "model/shapes/shapes.h"
#include "model/tokenizer/tokenizer.h"

namespace kvasir::cli {
namespace {

using compress::RandomCheckpointOptions;
using compress::RandomCheckpointProgress;

constexpr char kSizesGroup[] = "Sizes in place of the shape's";

struct InitFlags {
  std::string shape;
  // The values of the user's flags. A value that is not 0 or empty replaces the
  // value in the shape that --like names.
  model::ModelShape sizes;
  double rope_theta = 0.0;
  std::string head;
  std::string dtype = "bf16";
  std::string tokenizer;
  RandomCheckpointOptions options;
  bool quiet = false;
};

// A size in the model shape, and the flag that sets it.
struct SizeFlag {
  const char* flag;
  int64_t model::ModelShape::*size;
  const char* help;
};
constexpr SizeFlag kSizeFlags[] = {
    {"--layers", &model::ModelShape::num_layers, "Layers"},
    {"--hidden", &model::ModelShape::hidden_size,
     "Width of the residual stream"},
    {"--intermediate", &model::ModelShape::intermediate_size,
     "Width of the MLP"},
    {"--heads", &model::ModelShape::num_query_heads, "Query heads"},
    {"--kv-heads", &model::ModelShape::num_kv_heads, "KV heads"},
    {"--head-dim", &model::ModelShape::head_dim, "Numbers per head"},
    {"--context", &model::ModelShape::max_position, "Longest context, tokens"},
    {"--vocab", &model::ModelShape::vocab_size, "Vocabulary size"},
};

void AddShapeFlags(CLI::App* command, InitFlags& flags) {
  AddFlag(
      command, "--like", flags.shape,
      "Shape to start from: " + absl::StrJoin(model::KnownShapeNames(), ", "))
      ->check(ShapeName())
      ->required();
  const auto replaces = [&](const char* flag, auto& value, const char* help) {
    return command->add_option(flag, value, help)
        ->envname(EnvironmentName(flag))
        ->group(kSizesGroup);
  };
  for (const SizeFlag& size : kSizeFlags) {
    replaces(size.flag, flags.sizes.*size.size, size.help)->check(Above(0));
  }
  // The server accepts at most 1024 layers.
  command->get_option("--layers")->check(Between(1, 1024));
  replaces("--rope-theta", flags.rope_theta, "RoPE base")->check(Above(0));
  replaces("--output-head", flags.head, "tied or untied")
      ->check(CLI::IsMember({"tied", "untied"}));
}

absl::StatusOr<model::ModelShape> ShapeOf(const InitFlags& flags) {
  KVASIR_ASSIGN_OR_RETURN(model::ModelShape shape,
                          model::FindShape(flags.shape));
  for (const SizeFlag& size : kSizeFlags) {
    const int64_t value = flags.sizes.*size.size;
    if (value > 0) shape.*size.size = value;
  }
  if (flags.rope_theta > 0.0) shape.rope_theta = flags.rope_theta;
  if (!flags.head.empty()) shape.tied_embedding = flags.head == "tied";
  // A vocabulary that the user has made smaller may lack the shape's special
  // tokens.
  for (int64_t* const id : {&shape.bos_token_id, &shape.eos_token_id}) {
    if (*id >= shape.vocab_size) *id = shape.vocab_size - 1;
  }
  return shape;
}

absl::Status RunInit(InitFlags& flags) {
  RandomCheckpointOptions& options = flags.options;
  KVASIR_ASSIGN_OR_RETURN(options.shape, ShapeOf(flags));
  options.dtype =
      flags.dtype == "f32" ? model::TensorType::kF32 : model::TensorType::kBF16;
  if (!flags.tokenizer.empty()) {
    options.tokenizer = flags.tokenizer;
    KVASIR_ASSIGN_OR_RETURN(const std::unique_ptr<model::Tokenizer> tokenizer,
                            model::Tokenizer::Load(flags.tokenizer));
    if (tokenizer->vocab_size() > options.shape.vocab_size) {
      return absl::InvalidArgumentError(
          absl::StrCat(flags.tokenizer, " has ", tokenizer->vocab_size(),
                       " tokens, but the model has ", options.shape.vocab_size,
                       " (--vocab)"));
    }
  }
  constexpr int64_t kMegabyte = 1'000'000;
  std::optional<Progress> progress_line;
  KVASIR_RETURN_IF_ERROR(compress::WriteRandomCheckpoint(
      options, [&](const RandomCheckpointProgress& progress) {
        if (!progress_line) {
          progress_line.emplace("init", progress.total_bytes / kMegabyte, "MB",
                                !flags.quiet);
        }
        progress_line->Update(progress.written_bytes / kMegabyte);
        return !StopAsked();
      }));
  progress_line.reset();  // ends the line of the progress display
  absl::PrintF("%d parameters: %s\n", model::CountParameters(options.shape),
               base::Printable(options.out.string()));
  return absl::OkStatus();
}

}  // namespace

void AddInitCommand(CLI::App* app, int* exit_code) {
  auto owned = std::make_shared<InitFlags>();
  InitFlags& flags = *owned;
  flags.options.threads = base::ReadMachineLimits().cpus;
  CLI::App* command = app->add_subcommand(
      "init", "Writes a checkpoint of random weights, for benchmarks");
  command->group("Commands");
  AddShapeFlags(command, flags);
  RandomCheckpointOptions& options = flags.options;
  AddFlag(command, "--out", options.out, "Folder to write")->required();
  AddFlag(command, "--seed", options.seed, "Seed of the weights");
  AddFlag(command, "--dtype", flags.dtype, "bf16 or f32")
      ->check(CLI::IsMember({"bf16", "f32"}));
  AddModelFlag(command, "--tokenizer", flags.tokenizer,
               "Folder whose tokenizer files are copied");
  AddBytes(command, "--max-shard-bytes", options.max_shard_bytes,
           "Larger checkpoints become several files", {.least = 1});
  AddFlag(command, "--threads", options.threads, "Threads")->check(Above(0));
  AddSwitch(command, "--overwrite", options.overwrite,
            "Replace the weights in the folder");
  AddSwitch(command, "--quiet", flags.quiet, "Print no progress");
  command->callback([owned, exit_code] { Report(RunInit(*owned), exit_code); });
}

}  // namespace kvasir::cli
