// What a cache holds of a prompt once it is read, where layers give tokens up:
// what makes a plan that evicts comparable with one that does not.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cache/layout/layout.h"
#include "nlohmann/json_fwd.hpp"
#include "plan/resolved_plan.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

// What the first layer does that evicts.
struct EvictionSummary {
  std::string method;
  plan::EvictionCounts counts;
  int64_t sinks = 0;
  int64_t recent = 0;
  double lambda = 0;  // weight of attention received; 1: h2o
};
// Nothing: no layer evicts. `layout` is the plan's.
std::optional<EvictionSummary> SummarizeEviction(
    const kvasir::v1::KvPlan& plan, const cache::PageLayout& layout);

// Method, budget (slots, or a share below 1), sinks, recent, lambda, and the
// slots that are kept of a prompt of so many tokens.
nlohmann::ordered_json EvictionJson(const EvictionSummary& eviction,
                                    int64_t prompt_tokens);

// Slots that stay of such a prompt behind its last eviction, averaged over
// layers by their bytes of a slot.
double SlotsOfPrompt(const cache::PageLayout& layout, int64_t prompt_tokens);

}  // namespace kvasir::compress
