// `kvasir perplexity`: measures how well a model predicts a text, with the
// paged cache that requests use.
#include "worker/offline/perplexity.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/cli/flags.h"
#include "base/cli/progress.h"
#include "base/cli/units.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "nlohmann/json.hpp"
#include "server/commands/commands.h"
#include "server/flags/options.h"
#include "worker/load/device.h"
#include "worker/load/loaded_model.h"
#include "worker/load/model_options.h"
#include "worker/load/text_tokens.h"

namespace kvasir::cli {
namespace {

struct PerplexityFlags {
  ModelOptions model;
  std::string text;
  int64_t window = 512;
  int64_t chunk = 0;
  int64_t max_windows = 0;
  int64_t stride = 0;
  bool stream = false;
  int64_t passes = 1;
  bool json = false;
};

// Refuses a window that is longer than the model's maximum, before the weights
// are read.
absl::Status CheckWindow(const PerplexityFlags& flags) {
  KVASIR_ASSIGN_OR_RETURN(const ModelSource source,
                          OpenModelSource(flags.model, PlanUse::kRun));
  if (!flags.stream && flags.window > source.spec.max_position_embeddings) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--window ", flags.window, " tokens is above the model's limit of ",
        source.spec.max_position_embeddings, " tokens"));
  }
  return absl::OkStatus();
}

absl::StatusOr<TextTokens> EncodeText(const PerplexityFlags& flags) {
  KVASIR_ASSIGN_OR_RETURN(TextTokens encoded,
                          ReadTextTokens(flags.model.model, flags.text));
  if (flags.stream) {
    encoded.Repeat(flags.passes);
    return encoded;
  }
  const int64_t own = flags.window - (encoded.bos.has_value() ? 1 : 0);
  if (flags.max_windows > 0 && own > 0 &&
      static_cast<int64_t>(encoded.ids.size()) > flags.max_windows * own) {
    encoded.ids.resize(static_cast<size_t>(flags.max_windows * own));
    encoded.bytes.resize(encoded.ids.size());
  }
  return encoded;
}

// The number of parts of the text whose losses are reported separately. If
// several passes are streamed, each pass is a part. With one streamed pass, or
// with overlapping windows, the text has ten parts.
int64_t PartsOf(const PerplexityFlags& flags) {
  if (flags.stride > 0) return 10;
  if (!flags.stream) return 1;
  return flags.passes > 1 ? flags.passes : 10;
}

nlohmann::ordered_json PartsJson(const worker::PerplexityResult& result) {
  auto parts = nlohmann::ordered_json::array();
  for (const worker::PerplexityPart& part : result.parts) {
    parts.push_back(
        {{"nats_per_token", part.nats / static_cast<double>(part.tokens)},
         {"tokens", part.tokens},
         {"kv_held_bytes", part.held_bytes},
         {"allocated_bytes", part.allocated_bytes}});
  }
  return parts;
}

void PrintParts(const worker::PerplexityResult& result, const char* name) {
  std::printf("%-6s     tokens  nats/token    pages held    allocated\n", name);
  int number = 0;
  for (const worker::PerplexityPart& part : result.parts) {
    std::printf("%6d %10lld  %10.4f  %12s %12s\n", ++number,
                static_cast<long long>(part.tokens),
                part.nats / static_cast<double>(part.tokens),
                HumanBytes(static_cast<double>(part.held_bytes)).c_str(),
                HumanBytes(static_cast<double>(part.allocated_bytes)).c_str());
  }
}

absl::StatusOr<worker::PerplexityResult> Measure(const PerplexityFlags& flags) {
  KVASIR_RETURN_IF_ERROR(CheckWindow(flags));
  KVASIR_ASSIGN_OR_RETURN(const TextTokens text, EncodeText(flags));
  const int64_t window = flags.stream ? static_cast<int64_t>(text.ids.size()) +
                                            (text.bos.has_value() ? 1 : 0)
                                      : flags.window;
  const int64_t chunk =
      flags.chunk > 0 ? flags.chunk : std::min<int64_t>(window, 512);
  KVASIR_ASSIGN_OR_RETURN(const auto model,
                          LoadedModel::Load({.model = flags.model,
                                             .max_model_len = window,
                                             .max_num_seqs = 1,
                                             .max_batched_tokens = chunk,
                                             .prefix_reuse = false}));
  Progress progress("perplexity", static_cast<int64_t>(text.ids.size()),
                    "tokens", !flags.json);
  return worker::Perplexity(&model->rank().executor(),
                            {.token_ids = text.ids, .token_bytes = text.bytes},
                            {.window_tokens = window,
                             .chunk_tokens = chunk,
                             .bos_token_id = text.bos,
                             .stride_tokens = flags.stride,
                             .parts = PartsOf(flags),
                             .progress = [&progress](int64_t done, int64_t) {
                               progress.Update(done);
                             }});
}

absl::Status Run(const PerplexityFlags& flags) {
  KVASIR_ASSIGN_OR_RETURN(const worker::PerplexityResult result,
                          Measure(flags));
  if (flags.json) {
    nlohmann::ordered_json json{
        {"perplexity", result.perplexity},
        {"nats_per_byte", result.nats_per_byte},
        {"tokens", result.tokens},
        {"bytes", result.bytes},
        {"kv_bytes_per_token", result.kv_bytes_per_token},
        {"kv_compression_ratio", result.kv_compression_ratio},
        {"kv_fixed_bytes_per_sequence", result.kv_fixed_bytes_per_sequence},
        {"kv_pool_bytes", result.kv_pool_bytes},
        {"kv_pool_pages", result.kv_pool_pages},
        {"kv_held_tokens", result.kv_held_tokens},
        {"kv_held_bytes", result.kv_held_bytes}};
    if (PartsOf(flags) > 1) json["parts"] = PartsJson(result);
    std::printf("%s\n", json.dump().c_str());
    return absl::OkStatus();
  }
  std::printf(
      "perplexity            %.4f\n"
      "nats per byte         %.5f\n"
      "tokens scored         %lld (%lld bytes)\n"
      "KV bytes per token    %.1f\n"
      "compression ratio     %.3f (against bf16)\n",
      result.perplexity, result.nats_per_byte,
      static_cast<long long>(result.tokens),
      static_cast<long long>(result.bytes), result.kv_bytes_per_token,
      result.kv_compression_ratio);
  if (PartsOf(flags) > 1)
    PrintParts(result, flags.passes > 1 ? "pass" : "tenth");
  return absl::OkStatus();
}

}  // namespace

void AddPerplexityCommand(CLI::App* app, int* exit_code) {
  auto flags = std::make_shared<PerplexityFlags>();
  CLI::App* command = app->add_subcommand(
      "perplexity",
      "measure how well a model predicts a text with the paged cache of a "
      "plan");
  AddModelFlags(command, &flags->model);
  AddDeviceFlags(command, &flags->model.device);
  AddFlag(command, "--text", flags->text, "the text")
      ->type_name("FILE")
      ->required();
  AddFlag(command, "--window", flags->window,
          "tokens in a window; each window is a separate sequence")
      ->check(CLI::Range(2, 1 << 24));
  AddFlag(command, "--chunk", flags->chunk,
          "prefill this many tokens per step; 0: the window, but at "
          "most 512")
      ->check(CLI::Range(0, 1 << 20));
  AddFlag(command, "--max-windows", flags->max_windows,
          "stop after this many windows; 0: the whole text")
      ->check(CLI::Range(0, 1 << 30));
  AddFlag(command, "--stride", flags->stride,
          "overlapping windows: each begins this many tokens after "
          "the previous one, and only this many tokens at its "
          "end are scored; results are reported for tenths of "
          "the text; 0: windows do not overlap")
      ->check(CLI::Range(0, 1 << 24));
  AddSwitch(command, "--stream", flags->stream,
            "score the whole text as one sequence of any length; the "
            "plan must evict down to a fixed number of slots "
            "(--eviction-budget 256)");
  AddFlag(command, "--passes", flags->passes,
          "with --stream: repeat the text this many times, and "
          "report each pass")
      ->check(CLI::Range(1, 1 << 20));
  AddSwitch(command, "--json", flags->json, "print one JSON object");
  command->callback([flags, exit_code] {
    if (flags->model.random_weights) {
      throw CLI::ValidationError("--random-weights",
                                 "a text needs a tokenizer: give --model DIR");
    }
    if (flags->passes > 1 && !flags->stream) {
      throw CLI::ValidationError("--passes",
                                 "has an effect only with --stream");
    }
    if (flags->stream && flags->max_windows > 0) {
      throw CLI::ValidationError(
          "--max-windows",
          "cannot be combined with --stream, which is one window");
    }
    if (flags->stream && flags->stride > 0) {
      throw CLI::ValidationError(
          "--stride", "cannot be combined with --stream, which is one window");
    }
    if (flags->stride > 0 && flags->max_windows > 0) {
      throw CLI::ValidationError(
          "--max-windows",
          "cannot be combined with --stride, whose windows overlap: "
          "use a shorter text");
    }
    RequireModel(flags->model);
    base::InitLogging(base::LogFormat::kText, base::LogLevel::kWarning);
    const absl::Status status = Run(*flags);
    if (status.ok()) return;
    PrintError("kvasir perplexity", status.ToString());
    *exit_code = kExitFailed;
  });
}

}  // namespace kvasir::cli
