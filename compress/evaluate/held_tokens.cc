#include "compress/evaluate/held_tokens.h"

#include <algorithm>

#include "cache/eviction/eviction_schedule.h"
#include "nlohmann/json.hpp"
#include "plan/eviction.h"

namespace kvasir::compress {
namespace {

int64_t SlotsOf(const cache::PageGroupLayout& group, int64_t prompt_tokens) {
  if (group.sliding_window > 0) {
    return std::min(group.sliding_window, prompt_tokens);
  }
  return cache::EvictionSchedule(group.eviction, prompt_tokens)
      .SlotsAfter(prompt_tokens);
}

// Returns the name of the eviction method. A plan's method ends with this name,
// as in "lorc+h2o", unless the plan was written by hand.
std::string MethodOf(const kvasir::v1::KvPlan& plan,
                     const kvasir::v1::Eviction& eviction) {
  const std::string last = plan.method().substr(plan.method().rfind('+') + 1);
  if (plan::ParseEvictionMethod(last).ok()) return last;
  if (eviction.others() == kvasir::v1::Eviction::LATEST) return "streaming";
  return eviction.lambda() == 1 ? "h2o" : "q-hitter";
}

}  // namespace

std::optional<EvictionSummary> SummarizeEviction(
    const kvasir::v1::KvPlan& plan, const cache::PageLayout& layout) {
  for (int l = 0; l < plan.layers_size(); ++l) {
    if (!plan.layers(l).has_eviction()) continue;
    const kvasir::v1::Eviction& eviction = plan.layers(l).eviction();
    return EvictionSummary{
        .method = MethodOf(plan, eviction),
        .counts = layout.page_group(layout.layer(l).page_group).eviction,
        .sinks = eviction.sinks(),
        .recent = eviction.recent(),
        .lambda = eviction.lambda()};
  }
  return std::nullopt;
}

nlohmann::ordered_json EvictionJson(const EvictionSummary& eviction,
                                    int64_t prompt_tokens) {
  const plan::EvictionCounts& counts = eviction.counts;
  nlohmann::ordered_json json{{"method", eviction.method}};
  if (counts.budget_tokens > 0) {
    json["budget"] = counts.budget_tokens;
  } else {
    json["budget"] = counts.budget_ratio;
  }
  json["kept_slots"] =
      cache::EvictionSchedule(counts, prompt_tokens).SlotsAfter(prompt_tokens);
  json["sinks"] = eviction.sinks;
  json["recent"] = eviction.recent;
  json["lambda"] = eviction.lambda;
  return json;
}

double SlotsOfPrompt(const cache::PageLayout& layout, int64_t prompt_tokens) {
  double bytes = 0;
  double bytes_of_slot = 0;
  for (const cache::PageGroupLayout& group : layout.page_groups()) {
    const auto page_bytes = static_cast<double>(group.page_bytes);
    bytes += page_bytes * static_cast<double>(SlotsOf(group, prompt_tokens));
    bytes_of_slot += page_bytes;
  }
  return bytes / bytes_of_slot;
}

}  // namespace kvasir::compress
