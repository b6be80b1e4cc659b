// The result of `kvasir inspect --trace`: for each token of a text, when each
// eviction unit of each layer evicted it. follow_evictions.h runs the text.
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
  // The trace of one eviction unit (KV heads of a layer that evict the
  // same tokens).
  struct Unit {
    std::vector<int64_t> heads;
    // For each token, the number of tokens that the model had seen when the
    // token was evicted; 0 if it was not evicted.
    std::vector<int64_t> gone_at;
  };
  struct Layer {
    int64_t layer = 0;
    int64_t sinks = 0;   // first tokens that are never evicted
    int64_t recent = 0;  // latest tokens that an eviction keeps
    // false: no scores; only the sinks and the latest tokens are kept
    bool scored = true;
    int64_t kept = 0;             // slots that a unit has after an eviction
    std::vector<int64_t> points;  // tokens seen at each eviction
    std::vector<Unit> units;
  };
  // The tokens that a layer kept at its last eviction. `sinks`, `heavy` and
  // `recent` are summed over the layer's units.
  struct Summary {
    int64_t seen = 0;  // tokens that the model had seen; 0: nothing was evicted
    int64_t kept = 0;  // tokens that each unit kept
    int64_t sinks = 0;
    int64_t heavy = 0;  // kept tokens that are neither sinks nor recent
    int64_t recent = 0;
    std::optional<int64_t> oldest_heavy;
  };

  // Creates an empty trace for the layers of `plan` that evict.
  explicit EvictionTrace(const plan::ResolvedPlan& plan);

  // Sets the tokens of the run, in order, beginning with the prompt.
  void SetText(std::vector<std::string> tokens, int64_t prompt_tokens);
  // Records an eviction of layer `index` of layers() after `seen` tokens.
  // `positions` [units, kept] are the tokens that each unit kept, ascending.
  // INTERNAL if a position was evicted before or has not been seen.
  absl::Status Add(size_t index, int64_t seen,
                   absl::Span<const uint32_t> positions);

  const std::vector<Layer>& layers() const { return layers_; }
  Summary SummaryOf(const Layer& layer) const;

  nlohmann::ordered_json ToJson() const;
  // Returns a text with one line for each layer.
  std::string ToText() const;

 private:
  std::vector<std::string> tokens_;
  int64_t prompt_tokens_ = 0;
  std::vector<Layer> layers_;
};

}  // namespace kvasir::cli
