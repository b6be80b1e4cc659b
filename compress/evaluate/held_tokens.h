// Counts what a cache holds after a prompt was read, if layers evict tokens.
// This makes a plan that evicts comparable with one that does not.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cache/layout/layout.h"
#include "nlohmann/json_fwd.hpp"
#include "plan/resolved_plan.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

// The settings of the first layer that evicts.
struct EvictionSummary {
  std::string method;
  plan::EvictionCounts counts;
  int64_t sinks = 0;
  int64_t recent = 0;
  double lambda = 0;  // weight of the attention received; 1: h2o
};
// Empty if no layer evicts. `layout` is the plan's.
std::optional<EvictionSummary> SummarizeEviction(
    const kvasir::v1::KvPlan& plan, const cache::PageLayout& layout);

// Method, budget (slots, or a share below 1), sinks, recent, lambda, and the
// slots that are kept of a prompt of `prompt_tokens`.
nlohmann::ordered_json EvictionJson(const EvictionSummary& eviction,
                                    int64_t prompt_tokens);

// Slots that remain after the last eviction of a prompt of `prompt_tokens`,
// averaged over layers by their bytes of a slot.
double SlotsOfPrompt(const cache::PageLayout& layout, int64_t prompt_tokens);

}  // namespace kvasir::compress
