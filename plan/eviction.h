// Eviction on top of any plan: what "q-hitter at 20 %" comes to in every layer.
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

// Which slots stay beside sinks and recent ones.
enum class EvictionMethod {
  kQHitter,    // by attention received and friendliness to quantization
  kH2o,        // by attention received alone
  kStreaming,  // the latest ones
};
// "q-hitter", "h2o" or "streaming"; INVALID_ARGUMENT lists them.
absl::StatusOr<EvictionMethod> ParseEvictionMethod(absl::string_view name);

using proto::EvictionBudget;
using proto::ParseEvictionBudget;

// What is not said gets the default that stands behind it.
struct EvictionSettings {
  EvictionMethod method = EvictionMethod::kQHitter;
  EvictionBudget budget = {.ratio = 0.2};
  std::optional<uint32_t> sinks;   // 4; the plan's exact sinks where more
  std::optional<uint32_t> recent;  // 64, or a quarter of a budget in slots; the
                                   // plan's exact window where more
  // Of q-hitter. At 1 it is H2O: on a real model no weight of friendliness was
  // found better at 4 and 3 bits (docs/quality.md), where a slot that is coded
  // badly still says more than one that is not there. Its paper has 0.5.
  double lambda = 1;
  double decay = 1;
  uint32_t every_tokens = 128;
  uint32_t observation_window = 0;
  bool half_friendliness = false;
  // Positions are slots: keys are rotated when they are read, and those of a
  // whole space are stored so.
  bool rolling = false;

  bool operator==(const EvictionSettings&) const = default;
};

// Sets the eviction of every layer without a sliding window; one that was there
// gives way. INVALID_ARGUMENT when all layers have one. The plan is not judged:
// ValidatePlan says what of it makes no sense.
absl::Status ApplyEviction(const EvictionSettings& settings,
                           const AttentionShape& shape,
                           kvasir::v1::KvPlan* plan);

}  // namespace kvasir::plan
