// Compression plans by name. Presets that store whole keys and values serve any
// checkpoint as it is. The others are the plans that kvasir-compress' planners
// make if all layers and heads of a model are alike. They are for benchmarks:
// they need no calibration and say nothing about quality.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "plan/attention_shape.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::plan {

// The limit of attention over such a cache, and how near to it attention should
// be.
struct PlanPreset {
  std::string name;
  // One line for help texts.
  std::string text;
  // The most time that attention may take, as a multiple of the larger of the
  // byte floor and the FLOP floor. Empty if the project has no target.
  std::optional<double> floor_target;
  // The preset needs no tensors except the model's own.
  bool any_checkpoint = false;
};

// The first one is the dense bf16 cache.
const std::vector<PlanPreset>& PlanPresets();
inline constexpr char kDensePreset[] = "dense-bf16";
// A preset that serves a checkpoint without calibration (TurboQuant, Zandieh et
// al. 2025, without random signs). Each head's key and value is rotated by a
// Hadamard matrix and stored as codes of 4 bits, which stand for Lloyd-Max
// levels of a normal number, with one float16 for the length. The first and the
// latest tokens are also kept exact.
inline constexpr char kRotatedPreset[] = "rotated-4bit";

// NOT_FOUND lists the names.
absl::StatusOr<PlanPreset> FindPlanPreset(const std::string& name);

// One plan for all layers of the model. NOT_FOUND as above. INVALID_ARGUMENT if
// the preset does not suit the model's heads: its groups do not divide the head
// count, or RoPE rotates heads only in part or not at all (allowed if the
// preset stores whole keys).
absl::StatusOr<kvasir::v1::KvPlan> MakePresetPlan(const std::string& name,
                                                  const AttentionShape& shape);

}  // namespace kvasir::plan
