// Adds eviction to any plan: sets the fields for a method and a budget, like
// "q-hitter at 20 %", in every layer.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "plan/attention_shape.h"
#include "proto/eviction_budget.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::plan {

// The rule that selects the slots that stay besides sinks and recent tokens.
enum class EvictionMethod {
  // the slots that received the most attention and have the most accurate codes
  kQHitter,
  kH2o,        // the slots that received the most attention
  kStreaming,  // the latest slots
};
// Parses "q-hitter", "h2o" or "streaming". INVALID_ARGUMENT for another name;
// the error lists the known names.
absl::StatusOr<EvictionMethod> ParseEvictionMethod(absl::string_view name);

using proto::EvictionBudget;
using proto::ParseEvictionBudget;

// The settings of eviction. If an optional field has no value, the default in
// its comment applies.
struct EvictionSettings {
  EvictionMethod method = EvictionMethod::kQHitter;
  EvictionBudget budget = {.ratio = 0.2};
  // Default: 4, or the number of the plan's exact sinks if that is larger.
  std::optional<uint32_t> sinks;
  // Default: a quarter of a budget that is given in slots, otherwise 64; at
  // least the plan's exact window.
  std::optional<uint32_t> recent;
  // Q-Hitter's score weights attention with lambda and the accuracy of the
  // codes with 1 - lambda. If lambda is 1, the method is H2O. The paper uses
  // 0.5, but no value below 1 was better on a real model (docs/quality.md).
  double lambda = 1;
  double decay = 1;
  uint32_t every_tokens = 128;
  uint32_t observation_window = 0;
  bool half_friendliness = false;
  // True: the position of a key for RoPE is its slot index instead of its index
  // in the text. Slot indices change when slots are evicted, so full-rank keys
  // are then stored before RoPE and rotated when they are read.
  bool rolling = false;

  bool operator==(const EvictionSettings&) const = default;
};

// Sets or replaces the eviction of every layer without a sliding window.
// INVALID_ARGUMENT if all layers have a window. The result is not validated;
// call ValidatePlan.
absl::Status ApplyEviction(const EvictionSettings& settings,
                           const AttentionShape& shape,
                           kvasir::v1::KvPlan* plan);

}  // namespace kvasir::plan
