#include "server/inspect/eviction_trace.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "nlohmann/json.hpp"

namespace kvasir::cli {
namespace {

using nlohmann::ordered_json;

// Records that the tokens before `seen` that are not in `kept` are evicted, at
// a length of `seen` tokens.
absl::Status MarkGone(int64_t seen, absl::Span<const uint32_t> kept,
                      EvictionTrace::Unit* unit) {
  unit->gone_at.resize(static_cast<size_t>(seen));
  int64_t next = 0;  // all tokens before this one are done
  for (const uint32_t position : kept) {
    const auto token = static_cast<int64_t>(position);
    if (token < next || token >= seen ||
        unit->gone_at[static_cast<size_t>(token)] != 0) {
      return absl::InternalError(absl::StrCat(
          "token ", token, " cannot be kept: it must be from ", next, " to ",
          seen - 1, " and must not have been evicted before"));
    }
    for (; next < token; ++next) {
      int64_t& gone_at = unit->gone_at[static_cast<size_t>(next)];
      if (gone_at == 0) gone_at = seen;
    }
    ++next;
  }
  // Evictions always keep recent tokens, so the last token must have been kept.
  if (next != seen) {
    return absl::InternalError(absl::StrCat(
        "of the first ", seen, " tokens, those from ", next,
        " on are not kept, although recent tokens are never evicted"));
  }
  return absl::OkStatus();
}

// Returns the number of latest tokens that the layer never evicts.
int64_t RecentOf(const EvictionTrace::Layer& layer) {
  return layer.scored ? layer.recent
                      : std::max(layer.recent, layer.kept - layer.sinks);
}

ordered_json SummaryJson(const EvictionTrace::Summary& summary) {
  if (summary.seen == 0) return nullptr;
  return {{"seen_tokens", summary.seen},
          {"kept_slots", summary.kept},
          {"sinks", summary.sinks},
          {"heavy", summary.heavy},
          {"recent", summary.recent},
          {"oldest_heavy", summary.oldest_heavy.has_value()
                               ? ordered_json(*summary.oldest_heavy)
                               : ordered_json(nullptr)}};
}

}  // namespace

EvictionTrace::EvictionTrace(const plan::ResolvedPlan& plan) {
  for (int64_t layer = 0; layer < plan.num_layers(); ++layer) {
    const auto& eviction = plan.layer(layer).eviction;
    if (!eviction.has_value()) continue;
    Layer& out = layers_.emplace_back();
    out.layer = layer;
    out.sinks = eviction->sinks;
    out.recent = eviction->recent;
    out.scored = eviction->scored;
    for (const std::vector<int64_t>& heads : eviction->units) {
      out.units.push_back({.heads = heads});
    }
  }
}

void EvictionTrace::SetText(std::vector<std::string> tokens,
                            int64_t prompt_tokens) {
  tokens_ = std::move(tokens);
  prompt_tokens_ = prompt_tokens;
  for (Layer& layer : layers_) {
    for (Unit& unit : layer.units) unit.gone_at.resize(tokens_.size());
  }
}

absl::Status EvictionTrace::Add(size_t index, int64_t seen,
                                absl::Span<const uint32_t> positions) {
  Layer& layer = layers_[index];
  KVASIR_CHECK(positions.size() % layer.units.size() == 0);
  const size_t kept = positions.size() / layer.units.size();
  layer.kept = static_cast<int64_t>(kept);
  layer.points.push_back(seen);
  for (size_t u = 0; u < layer.units.size(); ++u) {
    const absl::Status status =
        MarkGone(seen, positions.subspan(u * kept, kept), &layer.units[u]);
    if (!status.ok()) {
      return absl::InternalError(absl::StrCat(
          "the eviction of layer ", layer.layer, ", unit ", u, " after ", seen,
          " tokens is impossible: ", status.message()));
    }
  }
  return absl::OkStatus();
}

EvictionTrace::Summary EvictionTrace::SummaryOf(const Layer& layer) const {
  Summary summary;
  if (layer.points.empty()) return summary;
  summary.seen = layer.points.back();
  summary.kept = layer.kept;
  const int64_t recent = RecentOf(layer);
  for (const Unit& unit : layer.units) {
    for (int64_t token = 0; token < summary.seen; ++token) {
      if (unit.gone_at[static_cast<size_t>(token)] != 0) continue;
      if (token < layer.sinks) {
        ++summary.sinks;
      } else if (token >= summary.seen - recent) {
        ++summary.recent;
      } else {
        ++summary.heavy;
        summary.oldest_heavy =
            std::min(summary.oldest_heavy.value_or(token), token);
      }
    }
  }
  return summary;
}

ordered_json EvictionTrace::ToJson() const {
  ordered_json layers = ordered_json::array();
  for (const Layer& layer : layers_) {
    ordered_json units = ordered_json::array();
    for (const Unit& unit : layer.units) {
      ordered_json gone_at = ordered_json::array();
      for (const int64_t seen : unit.gone_at) {
        gone_at.push_back(seen == 0 ? ordered_json(nullptr)
                                    : ordered_json(seen));
      }
      units.push_back({{"heads", unit.heads}, {"gone_at", std::move(gone_at)}});
    }
    layers.push_back({{"layer", layer.layer},
                      {"sinks", layer.sinks},
                      {"recent", RecentOf(layer)},
                      {"kept_slots", layer.kept},
                      {"evicted_at", layer.points},
                      {"last", SummaryJson(SummaryOf(layer))},
                      {"units", std::move(units)}});
  }
  return {{"prompt_tokens", prompt_tokens_},
          {"tokens", tokens_},
          {"layers", std::move(layers)}};
}

std::string EvictionTrace::ToText() const {
  std::string out = absl::StrFormat(
      "\ntokens that stayed, of %d tokens of the text and %d of "
      "output, at each layer's last eviction\nlayer  evictions   "
      "kept of seen       sinks  heavy  recent  oldest heavy  "
      "units\n",
      prompt_tokens_, static_cast<int64_t>(tokens_.size()) - prompt_tokens_);
  for (const Layer& layer : layers_) {
    const Summary summary = SummaryOf(layer);
    if (summary.seen == 0) {
      absl::StrAppendFormat(&out, "%5d          0   all\n", layer.layer);
      continue;
    }
    const auto share = [&](int64_t count) {
      const auto all =
          static_cast<double>(summary.sinks + summary.heavy + summary.recent);
      return absl::StrFormat("%.1f%%", 100 * static_cast<double>(count) / all);
    };
    absl::StrAppendFormat(
        &out, "%5d  %9d  %6d of %-6d  %6s %6s  %6s  %12s  %5d\n", layer.layer,
        layer.points.size(), summary.kept, summary.seen, share(summary.sinks),
        share(summary.heavy), share(summary.recent),
        summary.oldest_heavy.has_value() ? absl::StrCat(*summary.oldest_heavy)
                                         : "-",
        layer.units.size());
  }
  return out;
}

}  // namespace kvasir::cli
