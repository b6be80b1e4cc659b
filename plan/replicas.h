// Finds the cached data that several tensor-parallel ranks store for the same
// token. If heads of several ranks share a latent, each of these ranks stores
// the whole latent.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "plan/resolved_plan.h"

namespace kvasir::plan {

// A part's data that two or more ranks store for the same heads, in one or more
// consecutive layers.
struct Replica {
  int64_t first_layer = 0;
  int64_t last_layer = 0;
  std::optional<Side> side;  // empty: slot metadata of an eviction unit
  bool joint = false;  // a latent of both key and value; then `side` is the key
  int part = 0;        // index among the side's parts
  std::vector<int64_t> heads;  // KV heads of the model, ascending
  std::vector<int64_t> ranks;  // two or more, ascending
  // bytes of one copy, summed over the layers, without padding
  int64_t bytes_per_token = 0;

  // The bytes of all copies except the first one.
  int64_t extra_bytes_per_token() const {
    return bytes_per_token * (static_cast<int64_t>(ranks.size()) - 1);
  }
};

// Lists the replicas of a plan. `ranks` must have the plan resolved for each
// rank, in rank order. The result is sorted by layer, side, part and heads;
// metadata comes after the latents.
std::vector<Replica> FindReplicas(
    std::span<const std::shared_ptr<const ResolvedPlan>> ranks);

}  // namespace kvasir::plan
