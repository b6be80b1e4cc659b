// The rank table: one row per layer and side, for inspect and the metrics.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cache/layout.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::cli {

struct LayerSideSummary {
  int64_t layer = 0;
  std::string side;    // "key" or "value"
  std::string method;  // the parts' spaces: "full", "low_rank+rope_low_rank"
  int64_t rank = 0;    // numbers per token, all parts and groups
  std::string bits;    // "bf16", "4", "8,4,4,4,2,2,0,0"; parts joined by "+"
  double bytes_per_token = 0;  // payload, parameters included
  int64_t sliding_window = 0;  // 0: none
};

std::vector<LayerSideSummary> SummarizePlan(const kvasir::v1::KvPlan& plan,
                                            const cache::PageLayout& layout);

}  // namespace kvasir::cli
