// Finds the plans that --plan names.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "model/shapes/decoder_spec.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::cli {

// Returns the plan with the given name, which is a file's path if it ends in
// .json, and otherwise the name of one of plan::PlanPresets. If a file's plan
// is for a model of another shape, it is stretched to this shape
// (spread_plan.h). Errors contain the name.
absl::StatusOr<kvasir::v1::KvPlan> PlanNamed(const std::string& name,
                                             const model::DecoderSpec& spec);

}  // namespace kvasir::cli
