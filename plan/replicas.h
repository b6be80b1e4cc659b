// What a plan stores of a token on more than one tensor-parallel rank: a latent
// whose heads belong to several ranks is held whole by each of them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "plan/resolved_plan.h"

namespace kvasir::plan {

// The same heads on the same ranks, in layers that lie one behind the other.
struct Replica {
  int64_t first_layer = 0;
  int64_t last_layer = 0;
  std::optional<Side> side;    // none: slot metadata of an eviction unit
  bool joint = false;          // a latent of key and value; its side is the key
  int part = 0;                // of the side's
  std::vector<int64_t> heads;  // KV heads of the model, ascending
  std::vector<int64_t> ranks;  // two or more, ascending
  int64_t bytes_per_token = 0;  // of one copy, all layers, without padding

  // What the copies beyond the first one take.
  int64_t extra_bytes_per_token() const {
    return bytes_per_token * (static_cast<int64_t>(ranks.size()) - 1);
  }
};

// `ranks`: one plan, resolved for each rank in turn (CHECK). By layer, side,
// part and heads; metadata behind the latents.
std::vector<Replica> FindReplicas(
    std::span<const std::shared_ptr<const ResolvedPlan>> ranks);

}  // namespace kvasir::plan
