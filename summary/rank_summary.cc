#include "summary/rank_summary.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/cli/units.h"
#include "base/status_macros.h"
#include "model/shapes/attention_shape.h"
#include "model/shapes/tp_dealt.h"
#include "nlohmann/json.hpp"
#include "plan/tp_size.h"

namespace kvasir::cli {
namespace {

using nlohmann::ordered_json;

// The text shows at most this many lines of a list. The JSON has the
// complete list.
constexpr size_t kMostLines = 12;

std::string RangeText(int64_t first, int64_t last) {
  return first == last ? absl::StrCat(first) : absl::StrCat(first, "-", last);
}
std::string RangeText(const plan::HeadRange& heads) {
  return RangeText(heads.first, heads.end() - 1);
}

// Returns "0-3,6" for {0, 1, 2, 3, 6}.
std::string ListText(const std::vector<int64_t>& ascending) {
  std::vector<std::string> runs;
  for (size_t begin = 0; begin < ascending.size();) {
    size_t end = begin + 1;
    while (end < ascending.size() && ascending[end] == ascending[end - 1] + 1) {
      ++end;
    }
    runs.push_back(RangeText(ascending[begin], ascending[end - 1]));
    begin = end;
  }
  return absl::StrJoin(runs, ",");
}

std::string LayersText(int64_t first, int64_t last) {
  return absl::StrCat(first == last ? "layer " : "layers ",
                      RangeText(first, last));
}

std::string SideText(const plan::Replica& replica) {
  if (!replica.side.has_value()) return "slot metadata";
  if (replica.joint) return "key and value";
  return std::string(plan::SideName(*replica.side));
}

// If the layer's bytes per token differ between ranks, adds the layer to the
// last range of `uneven` or to a new range.
void AddUneven(int64_t layer, const std::vector<cache::PageLayout>& layouts,
               std::vector<UnevenLayers>* uneven) {
  const auto [least, most] = std::minmax_element(
      layouts.begin(), layouts.end(),
      [layer](const cache::PageLayout& a, const cache::PageLayout& b) {
        return a.layer(layer).page_bytes < b.layer(layer).page_bytes;
      });
  const auto bytes = [layer](const cache::PageLayout& layout) {
    return static_cast<double>(layout.layer(layer).page_bytes) /
           static_cast<double>(layout.page_tokens());
  };
  if (bytes(*least) == bytes(*most)) return;
  if (uneven->empty() || uneven->back().last_layer + 1 != layer) {
    uneven->push_back({.first_layer = layer});
  }
  uneven->back().last_layer = layer;
  uneven->back().least_bytes += bytes(*least);
  uneven->back().most_bytes += bytes(*most);
}

// Appends lines to `out`. Only the first line has the label.
void AppendLines(const char* label, const std::vector<std::string>& lines,
                 std::string* out) {
  for (size_t i = 0; i < std::min(lines.size(), kMostLines); ++i) {
    absl::StrAppendFormat(out, "  %-20s%s\n", i == 0 ? label : "", lines[i]);
  }
  if (lines.size() > kMostLines) {
    absl::StrAppendFormat(out, "  %-20s%d more, in --json\n", "",
                          lines.size() - kMostLines);
  }
}

void AppendReplicas(const RankSummary& summary, std::string* out) {
  std::vector<std::string> lines;
  for (const plan::Replica& replica : summary.replicas) {
    lines.push_back(ReplicaText(replica));
  }
  if (lines.empty()) return;
  AppendLines("on several ranks", lines, out);
  absl::StrAppendFormat(
      out, "  %-20sall ranks together take %d bytes a token more\n", "",
      summary.replicated_bytes_per_token());
}

void AppendUneven(const RankSummary& summary, std::string* out) {
  std::vector<std::string> lines;
  for (const UnevenLayers& layers : summary.uneven) {
    lines.push_back(
        absl::StrFormat("%s: %.1f to %.1f bytes a token",
                        LayersText(layers.first_layer, layers.last_layer),
                        layers.least_bytes, layers.most_bytes));
  }
  AppendLines("unequal ranks", lines, out);
}

}  // namespace

std::string ReplicaText(const plan::Replica& replica) {
  return absl::StrFormat(
      "%s %s, heads %s on ranks %s: %d bytes a token on each",
      LayersText(replica.first_layer, replica.last_layer), SideText(replica),
      ListText(replica.heads), ListText(replica.ranks),
      replica.bytes_per_token);
}

double RankSummary::most_kv_bytes_per_token() const {
  double most = 0;
  for (const RankShare& rank : ranks) {
    most = std::max(most, rank.kv_bytes_per_token);
  }
  return most;
}

int64_t RankSummary::replicated_bytes_per_token() const {
  int64_t bytes = 0;
  for (const plan::Replica& replica : replicas) {
    bytes += replica.extra_bytes_per_token();
  }
  return bytes;
}

int64_t RankSummary::replicated_weight_bytes() const {
  KVASIR_CHECK(whole_weight_bytes.has_value());
  int64_t bytes = 0;
  for (const RankShare& rank : ranks) bytes += rank.weight_bytes.value();
  return bytes - *whole_weight_bytes;
}

absl::StatusOr<RankPlans> ResolveForRanks(const kvasir::v1::KvPlan& plan,
                                          const model::DecoderSpec& spec,
                                          int64_t num_ranks) {
  const plan::TpDealt dealt = model::TpDealtOf(spec);
  KVASIR_RETURN_IF_ERROR(plan::CheckTpSize(dealt, num_ranks));
  const plan::AttentionShape shape = model::AttentionShapeOf(spec);
  RankPlans plans;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    auto resolved =
        plan::ResolvePlan(plan, shape, {.rank = rank, .size = num_ranks});
    if (!resolved.ok()) {
      std::vector<int64_t> sizes = plan::FittingTpSizes(dealt);
      std::erase_if(sizes, [&](int64_t size) {
        return !plan::ResolvePlan(plan, shape, {.rank = 0, .size = size}).ok();
      });
      return absl::Status(resolved.status().code(),
                          absl::StrCat(resolved.status().message(), "; ",
                                       plan::WouldDo(sizes)));
    }
    plans.push_back(
        std::make_shared<const plan::ResolvedPlan>(*std::move(resolved)));
  }
  return plans;
}

absl::StatusOr<RankSummary> SummarizeRanks(const RankPlans& plans,
                                           const model::DecoderSpec& spec,
                                           const cache::PageFormat& format) {
  RankSummary summary;
  const auto num_ranks = static_cast<int64_t>(plans.size());
  const int64_t features =
      (spec.num_expert_layers() > 0 ? spec.experts.intermediate_size
                                    : spec.intermediate_size) /
      num_ranks;
  std::vector<cache::PageLayout> layouts;
  for (const auto& plan : plans) {
    KVASIR_ASSIGN_OR_RETURN(cache::PageLayout layout,
                            cache::PageLayout::Create(*plan, format));
    summary.ranks.push_back(
        {.kv_heads = plan->kv_heads,
         .query_heads = plan->query_heads,
         .first_feature = plan->shard.rank * features,
         .num_features = features,
         .kv_bytes_per_token = layout.marginal_bytes_per_token(),
         .kv_payload_bytes_per_token =
             layout.marginal_payload_bytes_per_token(),
         .kv_fixed_bytes_per_sequence = layout.fixed_bytes_per_sequence()});
    layouts.push_back(std::move(layout));
  }
  summary.ranks_per_kv_head =
      std::max<int64_t>(1, num_ranks / spec.num_kv_heads);
  summary.replicas = plan::FindReplicas(plans);
  for (int64_t layer = 0; layer < spec.num_layers(); ++layer) {
    AddUneven(layer, layouts, &summary.uneven);
  }
  return summary;
}

std::string RanksText(const RankSummary& summary) {
  std::string out = absl::StrFormat(
      "tensor parallel       %d rank%s, KV bytes per token %.1f on the largest",
      summary.ranks.size(), summary.ranks.size() == 1 ? "" : "s",
      summary.most_kv_bytes_per_token());
  if (summary.ranks_per_kv_head > 1) {
    absl::StrAppendFormat(&out, "; each KV head is on %d ranks",
                          summary.ranks_per_kv_head);
  }
  absl::StrAppendFormat(
      &out, "\n%6s  %-8s  %-11s  %-12s  %11s  %11s  %-13s%s\n", "rank",
      "KV heads", "query heads", "MLP features", "bytes/token", "payload",
      "fixed/sequence",
      summary.whole_weight_bytes.has_value() ? "  weights" : "");
  for (size_t i = 0; i < summary.ranks.size(); ++i) {
    const RankShare& rank = summary.ranks[i];
    absl::StrAppendFormat(&out, "%6d  %-8s  %-11s  %-12s  %11.1f  %11.1f  ", i,
                          RangeText(rank.kv_heads), RangeText(rank.query_heads),
                          RangeText(rank.first_feature,
                                    rank.first_feature + rank.num_features - 1),
                          rank.kv_bytes_per_token,
                          rank.kv_payload_bytes_per_token);
    const std::string fixed =
        HumanBytes(static_cast<double>(rank.kv_fixed_bytes_per_sequence));
    if (rank.weight_bytes.has_value()) {
      absl::StrAppendFormat(
          &out, "%-14s  %s\n", fixed,
          HumanBytes(static_cast<double>(*rank.weight_bytes)));
    } else {
      absl::StrAppendFormat(&out, "%s\n", fixed);
    }
  }
  if (summary.whole_weight_bytes.has_value()) {
    absl::StrAppendFormat(
        &out, "  %-20s%s on a single rank; all ranks together take %s more\n",
        "weights", HumanBytes(static_cast<double>(*summary.whole_weight_bytes)),
        HumanBytes(static_cast<double>(summary.replicated_weight_bytes())));
  }
  AppendReplicas(summary, &out);
  AppendUneven(summary, &out);
  return out;
}

ordered_json RanksJson(const RankSummary& summary) {
  const auto or_null = [](const std::optional<int64_t>& number) {
    return number.has_value() ? ordered_json(*number) : ordered_json(nullptr);
  };
  ordered_json ranks = ordered_json::array();
  for (const RankShare& rank : summary.ranks) {
    ranks.push_back(
        {{"first_kv_head", rank.kv_heads.first},
         {"num_kv_heads", rank.kv_heads.count},
         {"first_head", rank.query_heads.first},
         {"num_heads", rank.query_heads.count},
         {"first_feature", rank.first_feature},
         {"num_features", rank.num_features},
         {"kv_bytes_per_token", rank.kv_bytes_per_token},
         {"kv_payload_bytes_per_token", rank.kv_payload_bytes_per_token},
         {"kv_fixed_bytes_per_sequence", rank.kv_fixed_bytes_per_sequence},
         {"weight_bytes", or_null(rank.weight_bytes)}});
  }
  ordered_json replicas = ordered_json::array();
  for (const plan::Replica& replica : summary.replicas) {
    replicas.push_back(
        {{"first_layer", replica.first_layer},
         {"last_layer", replica.last_layer},
         {"side", replica.side.has_value()
                      ? ordered_json(plan::SideName(*replica.side))
                      : ordered_json(nullptr)},
         {"joint", replica.joint},
         {"part", replica.part},
         {"heads", replica.heads},
         {"ranks", replica.ranks},
         {"bytes_per_token", replica.bytes_per_token},
         {"extra_bytes_per_token", replica.extra_bytes_per_token()}});
  }
  ordered_json uneven = ordered_json::array();
  for (const UnevenLayers& layers : summary.uneven) {
    uneven.push_back({{"first_layer", layers.first_layer},
                      {"last_layer", layers.last_layer},
                      {"least_bytes_per_token", layers.least_bytes},
                      {"most_bytes_per_token", layers.most_bytes}});
  }
  return {{"size", summary.ranks.size()},
          {"ranks", ranks},
          {"ranks_per_kv_head", summary.ranks_per_kv_head},
          {"most_kv_bytes_per_token", summary.most_kv_bytes_per_token()},
          {"replicated_bytes_per_token", summary.replicated_bytes_per_token()},
          {"replicas", replicas},
          {"uneven_layers", uneven},
          {"one_rank_weight_bytes", or_null(summary.whole_weight_bytes)},
          {"replicated_weight_bytes",
           summary.whole_weight_bytes.has_value()
               ? ordered_json(summary.replicated_weight_bytes())
               : ordered_json(nullptr)}};
}

}  // namespace kvasir::cli
