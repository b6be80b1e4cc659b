#include "cli/compress/report.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "cli/model_source.h"
#include "cli/plan_summary.h"
#include "cli/units.h"
#include "compress/oracle/cache_shape.h"
#include "nlohmann/json.hpp"

namespace kvasir::cli {
namespace {

using kvasir::v1::KvPlan;

// As `kvasir inspect` takes them unless told otherwise.
constexpr int64_t kPageTokens = 64;

constexpr int64_t kRangeBytes = 8;   // minimum and scale, float32
constexpr int64_t kFactorBytes = 2;  // a number of a basis, as stored

// Channels of 0 bits are not there.
int64_t StoredNumbers(const cache::PartLayout& part,
                      const cache::GroupLayout& group) {
  if (part.bits.empty()) return group.width;
  const int64_t stored = std::count_if(part.bits.begin(), part.bits.end(),
                                       [](int64_t bits) { return bits > 0; });
  return group.width * stored / static_cast<int64_t>(part.bits.size());
}

void CountPart(const kvasir::v1::Part& part, const cache::PartLayout& layout,
               int64_t dense_width, PlanBytes& bytes) {
  for (const cache::GroupLayout& group : layout.groups) {
    if (group.params.num_slots > 0) {
      bytes.parameters += static_cast<double>(group.params.slot_stride_bytes);
    }
    if (part.codec().has_channel_static()) {
      bytes.static_ranges += kRangeBytes * StoredNumbers(layout, group);
    }
  }
  if (part.has_full() && part.codec().has_basis_static()) {
    const int64_t rows = dense_width + (part.mean() ? 1 : 0);
    bytes.static_bases += kFactorBytes * rows * dense_width;
  }
}

}  // namespace

absl::StatusOr<cache::PageLayout> LayoutOfPlan(const KvPlan& plan,
                                               const model::DecoderSpec& spec) {
  return cache::PageLayout::Create(plan, compress::CacheShapeOf(spec),
                                   {.page_tokens = kPageTokens});
}

absl::StatusOr<double> BytesPerToken(const KvPlan& plan,
                                     const model::DecoderSpec& spec) {
  KVASIR_ASSIGN_OR_RETURN(const cache::PageLayout layout,
                          LayoutOfPlan(plan, spec));
  return layout.marginal_bytes_per_token();
}

PlanBytes CountPlan(const KvPlan& plan, const model::DecoderSpec& spec,
                    const cache::PageLayout& layout) {
  PlanBytes bytes;
  bytes.per_token = layout.marginal_bytes_per_token();
  bytes.payload = layout.marginal_payload_bytes_per_token();
  bytes.per_sequence = layout.fixed_bytes_per_sequence();
  const int64_t dense_width = spec.num_kv_heads * spec.head_dim;
  int64_t numbers = 0;
  for (int l = 0; l < plan.layers_size(); ++l) {
    for (const cache::Side side : {cache::Side::kKey, cache::Side::kValue}) {
      const auto& parts = side == cache::Side::kKey
                              ? plan.layers(l).key().parts()
                              : plan.layers(l).value().parts();
      for (const cache::PartLayout& part : layout.layer(l).side(side).parts) {
        CountPart(parts.Get(part.part_index), part, dense_width, bytes);
        for (const cache::GroupLayout& group : part.groups) {
          numbers += StoredNumbers(part, group);
        }
      }
    }
  }
  bytes.kept_numbers = static_cast<double>(numbers) /
                       static_cast<double>(2 * dense_width * spec.num_layers());
  return bytes;
}

absl::StatusOr<std::string> PlanReportText(const KvPlan& plan,
                                           const model::Checkpoint& base) {
  KVASIR_ASSIGN_OR_RETURN(const cache::PageLayout layout,
                          LayoutOfPlan(plan, base.spec()));
  const PlanBytes bytes = CountPlan(plan, base.spec(), layout);
  const DenseBytes dense = DenseBytesPerToken(layout, OwnCacheType(base));
  std::string text = absl::StrFormat(
      "plan                  %s%s%s\n"
      "kept numbers          %.1f %%\n"
      "KV bytes per token    %.1f (payload %.1f, of it scales and minima %.1f; "
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
  absl::StrAppend(&text,
                  "\nlayer side   method                     rank  bits        "
                  "     bytes/token\n");
  for (const LayerSideSummary& side : SummarizePlan(plan, layout)) {
    absl::StrAppendFormat(&text, "%5d %-6s %-25s %5d  %-16s %11.1f\n",
                          side.layer, side.side, side.method, side.rank,
                          side.bits, side.bytes_per_token);
  }
  return text;
}

absl::StatusOr<nlohmann::ordered_json> PlanReportJson(
    const KvPlan& plan, const model::Checkpoint& base) {
  KVASIR_ASSIGN_OR_RETURN(const cache::PageLayout layout,
                          LayoutOfPlan(plan, base.spec()));
  const PlanBytes bytes = CountPlan(plan, base.spec(), layout);
  const DenseBytes dense = DenseBytesPerToken(layout, OwnCacheType(base));
  nlohmann::ordered_json layers = nlohmann::ordered_json::array();
  for (const LayerSideSummary& side : SummarizePlan(plan, layout)) {
    layers.push_back({{"layer", side.layer},
                      {"side", side.side},
                      {"method", side.method},
                      {"rank", side.rank},
                      {"bits", side.bits},
                      {"bytes_per_token", side.bytes_per_token}});
  }
  return nlohmann::ordered_json{
      {"method", plan.method()},
      {"options", plan.provenance().options()},
      {"kept_numbers", bytes.kept_numbers},
      {"kv_bytes_per_token", bytes.per_token},
      {"kv_payload_bytes_per_token", bytes.payload},
      {"kv_parameter_bytes_per_token", bytes.parameters},
      {"kv_fixed_bytes_per_sequence", bytes.per_sequence},
      {"static_range_bytes", bytes.static_ranges},
      {"static_basis_bytes", bytes.static_bases},
      {"dense_type", cache::DataTypeName(dense.type)},
      {"dense_bytes_per_token", dense.own},
      {"dense_bf16_bytes_per_token", dense.bf16},
      {"kv_compression_ratio",
       static_cast<double>(dense.own) / bytes.per_token},
      {"kv_compression_ratio_bf16", layout.compression_ratio()},
      {"layers", layers}};
}

}  // namespace kvasir::cli
