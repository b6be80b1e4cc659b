// Compression plans by name, for benchmarks: what kvasir-compress' planners
// make of a model where every layer and head is alike. They need no weights and
// no calibration, so they say nothing about quality.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "plan/attention_shape.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::plan {

// What limits attention over a cache, and how near to it we want to be.
struct PlanPreset {
  std::string name;
  // One line, for help texts.
  std::string text;
  // Time over the larger of the byte and FLOP floors, at most; none is asked of
  // those that the project has no target for.
  std::optional<double> floor_target;
};

// The dense bf16 cache comes first.
const std::vector<PlanPreset>& PlanPresets();
inline constexpr char kDensePreset[] = "dense-bf16";

// NOT_FOUND lists the names.
absl::StatusOr<PlanPreset> FindPlanPreset(const std::string& name);

// One plan for all layers of the model. NOT_FOUND as above; INVALID_ARGUMENT
// for a model whose heads the preset does not suit (head counts that its groups
// do not divide, heads that RoPE turns in part or not at all).
absl::StatusOr<kvasir::v1::KvPlan> MakePresetPlan(const std::string& name,
                                                  const AttentionShape& shape);

}  // namespace kvasir::plan
