// Adds eviction to any plan: the fields that "q-hitter at 20 %" means in every
// layer.
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

// The rule for the slots that stay in addition to sinks and recent tokens.
enum class EvictionMethod {
  kQHitter,    // by attention received and friendliness to quantization
  kH2o,        // only by attention received
  kStreaming,  // the latest slots
};
// "q-hitter", "h2o" or "streaming"; INVALID_ARGUMENT lists them.
absl::StatusOr<EvictionMethod> ParseEvictionMethod(absl::string_view name);

using proto::EvictionBudget;
using proto::ParseEvictionBudget;

// A field without a value gets the default that its comment names.
struct EvictionSettings {
  EvictionMethod method = EvictionMethod::kQHitter;
  EvictionBudget budget = {.ratio = 0.2};
  // Default: 4, or the plan's exact sinks if they are more.
  std::optional<uint32_t> sinks;
  // Default: 64, or a quarter of a budget in slots; at least the plan's exact
  // window.
  std::optional<uint32_t> recent;
  // The weight of attention in q-hitter's score; at 1 it is H2O. The default is
  // 1 and not the 0.5 of its paper, because no weight of friendliness was found
  // to be better on a real model at 4 and 3 bits (docs/quality.md): a slot with
  // inaccurate codes is still worth more than no slot.
  double lambda = 1;
  double decay = 1;
  uint32_t every_tokens = 128;
  uint32_t observation_window = 0;
  bool half_friendliness = false;
  // Positions are slot indices. Keys are rotated when they are read, and a full
  // space stores them before RoPE.
  bool rolling = false;

  bool operator==(const EvictionSettings&) const = default;
};

// Sets the eviction of every layer without a sliding window and replaces any
// that was there. INVALID_ARGUMENT if all layers have a window. The resulting
// plan is not judged; call ValidatePlan.
absl::Status ApplyEviction(const EvictionSettings& settings,
                           const AttentionShape& shape,
                           kvasir::v1::KvPlan* plan);

}  // namespace kvasir::plan
