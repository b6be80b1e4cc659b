// Makes compression plans by name. Presets that store keys and values at
// full rank can be used with any checkpoint. The other presets are not
// calibrated: they serve only to measure speed, and the quality of their
// outputs is not meaningful.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "plan/attention_shape.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::plan {

struct PlanPreset {
  std::string name;
  // One line that describes the preset in help texts.
  std::string text;
  // The performance target: the most time that attention may take, as a
  // multiple of its lower bound from bytes and FLOPs (bench/floors.h). Empty if
  // the preset has no target.
  std::optional<double> floor_target;
  // True if the preset needs no tensors except the model's own.
  bool any_checkpoint = false;
  // True if --kv-plan auto may choose the preset. False for one of so few bits
  // that the check of a short text, in which the exact tokens are a large part,
  // says too little about it.
  bool auto_may_choose = false;
};

// All presets. The first one is the uncompressed bf16 cache.
const std::vector<PlanPreset>& PlanPresets();
inline constexpr char kDensePreset[] = "dense-bf16";
// A preset that serves a checkpoint without calibration. It is TurboQuant
// (Zandieh et al. 2025) without random signs. Each head's key and value is
// rotated by a Hadamard matrix and stored as 4-bit codes of Lloyd-Max levels,
// with its length as one float16. The first and the latest tokens are also
// kept exact. The other presets named rotated- have fewer bits and more exact
// tokens.
inline constexpr char kRotatedPreset[] = "rotated-4bit";

// NOT_FOUND for an unknown name; the error lists the known names.
absl::StatusOr<PlanPreset> FindPlanPreset(const std::string& name);

// Makes the preset's plan. NOT_FOUND for an unknown name. INVALID_ARGUMENT if
// the preset's groups do not divide the number of heads. Unless the preset
// stores full-rank keys, INVALID_ARGUMENT also if RoPE does not rotate all
// dimensions of each head or if head_dim is not a multiple of 4.
absl::StatusOr<kvasir::v1::KvPlan> MakePresetPlan(const std::string& name,
                                                  const AttentionShape& shape);

}  // namespace kvasir::plan
