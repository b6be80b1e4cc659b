// Which tokens of one text each layer's units kept, and until when: what
// `kvasir inspect --trace` tells. The record of a run that is made elsewhere
// (follow_evictions.h).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "nlohmann/json_fwd.hpp"
#include "plan/resolved_plan.h"

namespace kvasir::cli {

class EvictionTrace {
 public:
  // KV heads of a layer that give up the same tokens. A token that went never
  // comes back, so that one number says all of it.
  struct Unit {
    std::vector<int64_t> heads;
    // By token: how many had been seen when it went; 0: it is there.
    std::vector<int64_t> gone_at;
  };
  struct Layer {
    int64_t layer = 0;
    int64_t sinks = 0;
    int64_t recent = 0;
    bool scored = true;           // else all but the sinks are recent
    int64_t kept = 0;             // slots of a unit behind an eviction
    std::vector<int64_t> points;  // tokens seen at each eviction
    std::vector<Unit> units;
  };
  // Of what a layer's units kept at its last eviction, all units together.
  struct Summary {
    int64_t seen = 0;  // tokens; 0: nothing was evicted
    int64_t kept = 0;  // of these, by each unit
    int64_t sinks = 0;
    int64_t heavy = 0;  // neither sinks nor recent
    int64_t recent = 0;
    std::optional<int64_t> oldest_heavy;
  };

  // Of the layers that evict.
  explicit EvictionTrace(const plan::ResolvedPlan& plan);

  // The tokens that are run, in their order; the first are the prompt.
  void SetText(std::vector<std::string> tokens, int64_t prompt_tokens);
  // Layer `index` of layers() evicted when `seen` tokens were there; each unit
  // kept so many slots of these positions, ascending: [U, kept]. INTERNAL, with
  // the place, for what is no eviction: a token that went before, or has not
  // come.
  absl::Status Add(size_t index, int64_t seen,
                   absl::Span<const uint32_t> positions);

  const std::vector<Layer>& layers() const { return layers_; }
  Summary SummaryOf(const Layer& layer) const;

  nlohmann::ordered_json ToJson() const;
  // A line for each layer.
  std::string ToText() const;

 private:
  std::vector<std::string> tokens_;
  int64_t prompt_tokens_ = 0;
  std::vector<Layer> layers_;
};

}  // namespace kvasir::cli
