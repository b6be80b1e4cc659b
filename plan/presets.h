// Compression plans by name. Those that store whole keys and values serve any
// checkpoint as it is; the others are what kvasir-compress' planners make of a
// model where every layer and head is alike: for benchmarks, they need no
// calibration and say nothing about quality.
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
  // It needs no tensors but the model's own.
  bool any_checkpoint = false;
};

// The dense bf16 cache comes first.
const std::vector<PlanPreset>& PlanPresets();
inline constexpr char kDensePreset[] = "dense-bf16";
// What a checkpoint can be served with that nobody calibrated: codes of 4 bits,
// of each head's key and value behind a Hadamard matrix, by Lloyd-Max levels of
// a normal number, and one float16 for the length (TurboQuant, Zandieh et al.
// 2025, without random signs); the first and the latest tokens are kept exact.
inline constexpr char kRotatedPreset[] = "rotated-4bit";

// NOT_FOUND lists the names.
absl::StatusOr<PlanPreset> FindPlanPreset(const std::string& name);

// One plan for all layers of the model. NOT_FOUND as above; INVALID_ARGUMENT
// for a model whose heads the preset does not suit (head counts that its groups
// do not divide; unless it stores whole keys, heads that RoPE turns in part or
// not at all).
absl::StatusOr<kvasir::v1::KvPlan> MakePresetPlan(const std::string& name,
                                                  const AttentionShape& shape);

}  // namespace kvasir::plan
