// The record of `kvasir inspect --trace`: which tokens of a text each layer's
// units kept, and until when. follow_evictions.h makes the run.
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
  // KV heads of a layer that evict the same tokens. An evicted token never
  // returns, so one number per token is enough.
  struct Unit {
    std::vector<int64_t> heads;
    // For each token, the number of tokens seen when it was evicted; 0: it is
    // still there.
    std::vector<int64_t> gone_at;
  };
  struct Layer {
    int64_t layer = 0;
    int64_t sinks = 0;
    int64_t recent = 0;
    bool scored = true;           // false: all tokens except sinks are recent
    int64_t kept = 0;             // slots of a unit after an eviction
    std::vector<int64_t> points;  // tokens seen at each eviction
    std::vector<Unit> units;
  };
  // The tokens that the units of a layer kept at its last eviction, together.
  struct Summary {
    int64_t seen = 0;  // tokens seen; 0: nothing was evicted
    int64_t kept = 0;  // tokens that each unit kept
    int64_t sinks = 0;
    int64_t heavy = 0;  // kept tokens that are neither sinks nor recent
    int64_t recent = 0;
    std::optional<int64_t> oldest_heavy;
  };

  // A trace of the layers that evict.
  explicit EvictionTrace(const plan::ResolvedPlan& plan);

  // Sets the tokens of the run, in order, beginning with the prompt.
  void SetText(std::vector<std::string> tokens, int64_t prompt_tokens);
  // Records that layer `index` of layers() evicted after `seen` tokens. Each
  // unit kept these positions, ascending: [U, kept]. INTERNAL, with the place,
  // if a position was evicted before or has not been seen.
  absl::Status Add(size_t index, int64_t seen,
                   absl::Span<const uint32_t> positions);

  const std::vector<Layer>& layers() const { return layers_; }
  Summary SummaryOf(const Layer& layer) const;

  nlohmann::ordered_json ToJson() const;
  // One line per layer.
  std::string ToText() const;

 private:
  std::vector<std::string> tokens_;
  int64_t prompt_tokens_ = 0;
  std::vector<Layer> layers_;
};

}  // namespace kvasir::cli
