// `kvasir inspect`: what a folder's cache costs, without reading its weights.
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "cache/layout.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/model_source.h"
#include "cli/options.h"
#include "cli/plan_summary.h"
#include "nlohmann/json.hpp"

namespace kvasir::cli {
namespace {

struct InspectFlags {
  ModelOptions model;
  int64_t max_batched_tokens = 512;
  std::vector<int64_t> lengths = {1024, 4096, 32768, 131072};
  bool json = false;
};

nlohmann::ordered_json ToJson(const InspectFlags& flags,
                              const ModelSource& source,
                              const cache::PageLayout& layout) {
  nlohmann::ordered_json layers = nlohmann::ordered_json::array();
  for (const LayerSideSummary& side : SummarizePlan(source.plan, layout)) {
    layers.push_back({{"layer", side.layer},
                      {"side", side.side},
                      {"method", side.method},
                      {"rank", side.rank},
                      {"bits", side.bits},
                      {"bytes_per_token", side.bytes_per_token},
                      {"sliding_window", side.sliding_window}});
  }
  nlohmann::ordered_json at_length = nlohmann::ordered_json::array();
  for (const int64_t length : flags.lengths) {
    at_length.push_back(
        {{"tokens", length},
         {"kv_bytes", layout.BytesAtLength(length, flags.max_batched_tokens)}});
  }
  return {
      {"model", source.name},
      {"model_type", source.spec.model_type},
      {"method", source.plan.method()},
      {"num_layers", source.spec.num_layers()},
      {"num_kv_heads", source.spec.num_kv_heads},
      {"head_dim", source.spec.head_dim},
      {"weight_bytes", WeightBytes(source).bytes},
      {"page_tokens", layout.page_tokens()},
      {"kv_bytes_per_token", layout.marginal_bytes_per_token()},
      {"kv_payload_bytes_per_token", layout.marginal_payload_bytes_per_token()},
      {"kv_fixed_bytes_per_sequence", layout.fixed_bytes_per_sequence()},
      {"dense_bf16_bytes_per_token", layout.dense_bf16_bytes_per_token()},
      {"kv_compression_ratio", layout.compression_ratio()},
      {"at_length", at_length},
      {"layers", layers}};
}

void PrintText(const InspectFlags& flags, const ModelSource& source,
               const cache::PageLayout& layout) {
  const model::DecoderSpec& spec = source.spec;
  std::printf("%s (%s): %lld layers, %lld query and %lld KV heads of %lld\n",
              source.name.c_str(), spec.model_type.c_str(),
              static_cast<long long>(spec.num_layers()),
              static_cast<long long>(spec.num_heads),
              static_cast<long long>(spec.num_kv_heads),
              static_cast<long long>(spec.head_dim));
  const int64_t weights = WeightBytes(source).bytes;
  if (weights > 0) {
    std::printf("weights               %s\n",
                HumanBytes(static_cast<double>(weights)).c_str());
  }
  std::printf("plan                  %s\n", source.plan.method().c_str());
  std::printf("KV bytes per token    %.1f (payload %.1f, dense bf16 %lld)\n",
              layout.marginal_bytes_per_token(),
              layout.marginal_payload_bytes_per_token(),
              static_cast<long long>(layout.dense_bf16_bytes_per_token()));
  std::printf("compression ratio     %.3f\n", layout.compression_ratio());
  std::printf("fixed per sequence    %s\n",
              HumanBytes(static_cast<double>(layout.fixed_bytes_per_sequence()))
                  .c_str());
  std::printf("\nlayer side   method      rank  bits  bytes/token  window\n");
  for (const LayerSideSummary& side : SummarizePlan(source.plan, layout)) {
    std::printf("%5lld %-6s %-10s %5lld  %-5s %11.1f  %s\n",
                static_cast<long long>(side.layer), side.side.c_str(),
                side.method.c_str(), static_cast<long long>(side.rank),
                side.bits.c_str(), side.bytes_per_token,
                side.sliding_window == 0
                    ? "-"
                    : absl::StrCat(side.sliding_window).c_str());
  }
  std::printf("\ntokens of a sequence  KV bytes%s\n",
              weights > 0 ? "      weights + KV" : "");
  for (const int64_t length : flags.lengths) {
    const double bytes = static_cast<double>(
        layout.BytesAtLength(length, flags.max_batched_tokens));
    std::printf("%20lld  %-12s  %s\n", static_cast<long long>(length),
                HumanBytes(bytes).c_str(),
                weights > 0
                    ? HumanBytes(bytes + static_cast<double>(weights)).c_str()
                    : "");
  }
}

absl::Status Inspect(const InspectFlags& flags) {
  KVASIR_ASSIGN_OR_RETURN(const ModelSource source,
                          OpenModelSource(flags.model, PlanUse::kLook));
  KVASIR_ASSIGN_OR_RETURN(const cache::PageLayout layout,
                          cache::PageLayout::Create(
                              source.plan, source.cache_shape,
                              {.page_tokens = flags.model.page_tokens,
                               .max_chunk_tokens = flags.max_batched_tokens}));
  if (flags.json) {
    std::printf("%s\n", ToJson(flags, source, layout).dump(2).c_str());
  } else {
    PrintText(flags, source, layout);
  }
  return absl::OkStatus();
}

}  // namespace

void AddInspectCommand(CLI::App* app, int* exit_code) {
  auto flags = std::make_shared<InspectFlags>();
  CLI::App* command = app->add_subcommand(
      "inspect", "rank table and bytes of a model's cache, without loading it");
  AddModelFlags(command, &flags->model);
  command->add_option("folder", flags->model.model, "the same as --model");
  AddFlag(command, "--max-batched-tokens", flags->max_batched_tokens,
          "longest step, for layers with a sliding window")
      ->check(CLI::Range(1, 1 << 20));
  AddFlag(command, "--lengths", flags->lengths, "sequence lengths to tell")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 30));
  AddSwitch(command, "--json", flags->json, "print a JSON object");
  command->callback([flags, exit_code] {
    RequireModel(flags->model);
    const absl::Status status = Inspect(*flags);
    if (status.ok()) return;
    std::fprintf(stderr, "kvasir inspect: %s\n", status.ToString().c_str());
    *exit_code = kExitFailed;
  });
}

}  // namespace kvasir::cli
