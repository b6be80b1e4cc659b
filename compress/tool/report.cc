#include "compress/tool/report.h"

#include <cstdint>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/cli/units.h"
#include "base/status_macros.h"
#include "cache/layout/layout.h"
#include "compress/evaluate/held_tokens.h"
#include "model/checkpoint/cache_type.h"
#include "model/shapes/attention_shape.h"
#include "nlohmann/json.hpp"
#include "plan/resolved_plan.h"
#include "summary/plan_summary.h"

namespace kvasir::cli {
namespace {

using kvasir::v1::KvPlan;

// The default page size of `kvasir inspect`.
constexpr int64_t kPageTokens = 64;

// bytes of a channel's minimum and scale, float32
constexpr int64_t kRangeBytes = 8;
constexpr int64_t kFactorBytes = 2;  // bytes of one stored number of a basis

struct PlanBytes {
  double per_token = 0;       // bytes per token, with padding
  double payload = 0;         // bytes per token, without padding
  double parameters = 0;      // scales and minima, a part of the payload
  int64_t per_sequence = 0;   // bytes of side pages, which hold exact rows
  int64_t static_ranges = 0;  // CHANNEL_STATIC ranges, stored once per model
  int64_t static_bases = 0;   // BASIS_STATIC bases in float16, once per model
  double kept_numbers = 0;    // as a share of the dense cache's numbers
};
void CountPart(const plan::ResolvedPart& part, const cache::PartLayout& layout,
               int64_t dense_width, PlanBytes& bytes) {
  for (const cache::GroupLayout& group : layout.groups) {
    if (group.params.num_slots > 0) {
      bytes.parameters += static_cast<double>(group.params.slot_bytes);
    }
  }
  // part.channels() does not count channels of 0 bits, which are not stored.
  if (part.range == plan::RangeKind::kChannel) {
    bytes.static_ranges += kRangeBytes * part.channels();
  }
  if (part.space == plan::Space::kFull &&
      part.transform == plan::Transform::kBasisStatic) {
    const int64_t rows = dense_width + (part.mean ? 1 : 0);
    bytes.static_bases += kFactorBytes * rows * dense_width;
  }
}

// A resolved plan with its page layout.
struct LaidOut {
  plan::ResolvedPlan plan;
  cache::PageLayout layout;
};

absl::StatusOr<LaidOut> LayOut(const KvPlan& plan,
                               const model::DecoderSpec& spec) {
  KVASIR_ASSIGN_OR_RETURN(
      plan::ResolvedPlan resolved,
      plan::ResolvePlan(plan, model::AttentionShapeOf(spec)));
  KVASIR_ASSIGN_OR_RETURN(
      cache::PageLayout layout,
      cache::PageLayout::Create(resolved, {.page_tokens = kPageTokens}));
  return LaidOut{std::move(resolved), std::move(layout)};
}

PlanBytes CountPlan(const LaidOut& of) {
  const cache::PageLayout& layout = of.layout;
  PlanBytes bytes;
  bytes.per_token = layout.marginal_bytes_per_token();
  bytes.payload = layout.marginal_payload_bytes_per_token();
  bytes.per_sequence = layout.fixed_bytes_per_sequence();
  const int64_t dense_width =
      of.plan.shape.num_kv_heads * of.plan.shape.head_dim;
  int64_t numbers = 0;
  for (int64_t l = 0; l < of.plan.num_layers(); ++l) {
    for (const plan::Side side : {plan::Side::kKey, plan::Side::kValue}) {
      const auto& parts = of.plan.attention_of(l).side(side).parts;
      for (const cache::PartLayout& laid_out :
           layout.layer(l).side(side).parts) {
        if (laid_out.of_keys) continue;
        const plan::ResolvedPart& part =
            parts[static_cast<size_t>(laid_out.part_index)];
        CountPart(part, laid_out, dense_width, bytes);
        for (const plan::ResolvedLatent& latent : part.latents) {
          numbers += latent.stored_channels();
        }
      }
    }
  }
  bytes.kept_numbers =
      static_cast<double>(numbers) /
      static_cast<double>(2 * dense_width * of.plan.num_layers());
  return bytes;
}

}  // namespace

absl::StatusOr<double> BytesPerToken(const KvPlan& plan,
                                     const model::DecoderSpec& spec) {
  KVASIR_ASSIGN_OR_RETURN(const LaidOut of, LayOut(plan, spec));
  return of.layout.marginal_bytes_per_token();
}

absl::StatusOr<RankSummary> RanksOfPlan(const KvPlan& plan,
                                        const model::DecoderSpec& spec,
                                        int64_t num_ranks) {
  KVASIR_ASSIGN_OR_RETURN(const RankPlans plans,
                          ResolveForRanks(plan, spec, num_ranks));
  return SummarizeRanks(plans, spec, {.page_tokens = kPageTokens});
}

absl::StatusOr<std::string> PlanReportText(const KvPlan& plan,
                                           const model::Checkpoint& base) {
  KVASIR_ASSIGN_OR_RETURN(const LaidOut of, LayOut(plan, base.spec()));
  const PlanBytes bytes = CountPlan(of);
  const DenseBytes dense = DenseBytesPerToken(of.layout, OwnCacheType(base));
  std::string text = absl::StrFormat(
      "plan                  %s%s%s\n"
      "kept numbers          %.1f %%\n"
      "KV bytes per token    %.1f (payload %.1f, of which %.1f are scales and "
      "minima; "
      "%s)\n"
      "compression ratio     %s\n",
      plan.method(), plan.provenance().options().empty() ? "" : ": ",
      plan.provenance().options(), 100.0 * bytes.kept_numbers, bytes.per_token,
      bytes.payload, bytes.parameters, dense.text(),
      dense.RatioText(bytes.per_token));
  if (bytes.static_ranges + bytes.static_bases > 0) {
    absl::StrAppendFormat(&text, "once for the model    ranges %s, bases %s\n",
                          HumanBytes(static_cast<double>(bytes.static_ranges)),
                          HumanBytes(static_cast<double>(bytes.static_bases)));
  }
  if (bytes.per_sequence > 0) {
    absl::StrAppendFormat(&text, "fixed per sequence    %s\n",
                          HumanBytes(static_cast<double>(bytes.per_sequence)));
  }
  for (const plan::ResolvedPageGroup& group : of.plan.page_groups) {
    const plan::EvictionCounts& eviction = group.eviction;
    if (!eviction.evicts()) continue;
    const std::string budget =
        eviction.budget_tokens > 0
            ? absl::StrCat(eviction.budget_tokens, " slots")
            : absl::StrFormat("%g %% of the prompt, %d slots at least",
                              100.0 * eviction.budget_ratio,
                              eviction.least_tokens);
    absl::StrAppendFormat(&text,
                          "kept tokens           %s, in %d layers; evictions "
                          "come every %d tokens\n",
                          budget, group.layers.size(), eviction.every_tokens);
  }
  absl::StrAppend(&text,
                  "\nlayer side   method                     rank  bits        "
                  "     bytes/token\n");
  for (const LayerSideSummary& side : SummarizePlan(of.plan, of.layout)) {
    absl::StrAppendFormat(&text, "%5d %-6s %-25s %5d  %-16s %11.1f\n",
                          side.layer, side.side, side.method, side.rank,
                          side.bits, side.bytes_per_token);
  }
  return text;
}

absl::StatusOr<nlohmann::ordered_json> PlanReportJson(
    const KvPlan& plan, const model::Checkpoint& base) {
  KVASIR_ASSIGN_OR_RETURN(const LaidOut of, LayOut(plan, base.spec()));
  const PlanBytes bytes = CountPlan(of);
  const DenseBytes dense = DenseBytesPerToken(of.layout, OwnCacheType(base));
  nlohmann::ordered_json layers = nlohmann::ordered_json::array();
  for (const LayerSideSummary& side : SummarizePlan(of.plan, of.layout)) {
    layers.push_back({{"layer", side.layer},
                      {"side", side.side},
                      {"method", side.method},
                      {"rank", side.rank},
                      {"bits", side.bits},
                      {"bytes_per_token", side.bytes_per_token}});
  }
  // The number of kept slots is shown for a prompt of the model's maximum
  // length.
  const int64_t tokens = base.spec().max_position_embeddings;
  nlohmann::ordered_json json{
      {"method", plan.method()},
      {"options", plan.provenance().options()},
      {"kept_numbers", bytes.kept_numbers},
      {"kv_bytes_per_token", bytes.per_token},
      {"kv_payload_bytes_per_token", bytes.payload},
      {"kv_parameter_bytes_per_token", bytes.parameters},
      {"kv_fixed_bytes_per_sequence", bytes.per_sequence},
      {"static_range_bytes", bytes.static_ranges},
      {"static_basis_bytes", bytes.static_bases},
      {"sequence_tokens", tokens},
      {"kv_bytes_per_sequence",
       bytes.per_token * compress::SlotsOfPrompt(of.layout, tokens) +
           static_cast<double>(bytes.per_sequence)},
      {"dense_type", plan::DataTypeName(dense.type)},
      {"dense_bytes_per_token", dense.own},
      {"dense_bf16_bytes_per_token", dense.bf16},
      {"kv_compression_ratio",
       static_cast<double>(dense.own) / bytes.per_token},
      {"kv_compression_ratio_bf16", of.layout.compression_ratio()},
      {"layers", layers}};
  if (const auto evicts = compress::SummarizeEviction(plan, of.layout)) {
    json["eviction"] = compress::EvictionJson(*evicts, tokens);
  }
  return json;
}

}  // namespace kvasir::cli
