// `kvasir-compress init`: checkpoints of random weights.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/machine.h"
#include "base/status_macros.h"
#include "cli/compress/commands.h"
#include "cli/compress/shape_flags.h"
#include "cli/flags.h"
#include "cli/progress.h"
#include "compress/artifact/random_checkpoint.h"
#include "model/shapes/shapes.h"
#include "model/tokenizer/tokenizer.h"

namespace kvasir::cli {
namespace {

using compress::RandomCheckpointOptions;
using compress::RandomCheckpointProgress;
using compress::StoredDtype;

struct InitFlags {
  ShapeFlags shape;
  std::string dtype = "bf16";
  std::string tokenizer;
  RandomCheckpointOptions options;
  bool quiet = false;
};

absl::Status RunInit(InitFlags& flags) {
  RandomCheckpointOptions& options = flags.options;
  KVASIR_ASSIGN_OR_RETURN(options.shape, ShapeOf(flags.shape));
  options.dtype = flags.dtype == "f32" ? StoredDtype::kF32 : StoredDtype::kBf16;
  if (!flags.tokenizer.empty()) {
    options.tokenizer = flags.tokenizer;
    KVASIR_ASSIGN_OR_RETURN(const std::unique_ptr<model::Tokenizer> tokenizer,
                            model::Tokenizer::Load(flags.tokenizer));
    if (tokenizer->vocab_size() > options.shape.vocab_size) {
      return absl::InvalidArgumentError(absl::StrCat(
          flags.tokenizer, " has ", tokenizer->vocab_size(),
          " tokens, the model ", options.shape.vocab_size, " (--vocab)"));
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
  progress_line.reset();  // ends its line
  absl::PrintF("%d parameters: %s\n", model::CountParameters(options.shape),
               options.out.string());
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
  AddShapeFlags(command, "--like", flags.shape);
  command->get_option("--like")->required();
  command
      ->add_option("--vocab", flags.shape.sizes.vocab_size, "Vocabulary size")
      ->check(Above(0))
      ->group(kSizesGroup);
  RandomCheckpointOptions& options = flags.options;
  AddFlag(command, "--out", options.out, "Folder to write")->required();
  AddFlag(command, "--seed", options.seed, "Seed of the weights");
  AddFlag(command, "--dtype", flags.dtype, "bf16 or f32")
      ->check(CLI::IsMember({"bf16", "f32"}));
  AddFlag(command, "--tokenizer", flags.tokenizer,
          "Folder whose tokenizer files are copied");
  AddBytes(command, "--max-shard-bytes", options.max_shard_bytes,
           "Larger checkpoints become several files", {.least = 1});
  AddFlag(command, "--threads", options.threads, "Threads")->check(Above(0));
  AddSwitch(command, "--overwrite", options.overwrite,
            "Replace the weights in the folder");
  AddSwitch(command, "--quiet", flags.quiet, "No progress");
  command->callback([owned, exit_code] { Report(RunInit(*owned), exit_code); });
}

}  // namespace kvasir::cli
