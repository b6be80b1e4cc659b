// Counts how many tokens a cache still holds after a prompt was read, if layers
// evict tokens. This makes the bytes of plans with and without eviction
// comparable.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cache/layout/layout.h"
#include "nlohmann/json_fwd.hpp"
#include "plan/resolved_plan.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

// The eviction settings of a plan, taken from its first layer that evicts
// tokens.
struct EvictionSummary {
  std::string method;
  plan::EvictionCounts counts;
  int64_t sinks = 0;
  int64_t recent = 0;
  double lambda = 0;  // weight of received attention; 1 for h2o
};
// Returns the plan's eviction settings, or nullopt if no layer evicts tokens.
// `layout` must be the page layout of `plan`.
std::optional<EvictionSummary> SummarizeEviction(
    const kvasir::v1::KvPlan& plan, const cache::PageLayout& layout);

// A JSON object with method, budget (a number of slots, or a share of the
// prompt), sinks, recent, lambda, and kept_slots: how many tokens remain after
// a prompt of `prompt_tokens`.
nlohmann::ordered_json EvictionJson(const EvictionSummary& eviction,
                                    int64_t prompt_tokens);

// Returns how many slots of a layer remain after a prompt of `prompt_tokens`
// was read. This is a mean over layers, weighted by the bytes of each layer's
// slot.
double SlotsOfPrompt(const cache::PageLayout& layout, int64_t prompt_tokens);

}  // namespace kvasir::compress
