// Plans that --plan names.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "model/shapes/decoder_spec.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::cli {

// `name` is a file if it ends in .json, else one of plan::PlanPresets. If a
// file's plan is for another shape, it is spread over this one (spread_plan.h).
// Errors contain the name.
absl::StatusOr<kvasir::v1::KvPlan> PlanNamed(const std::string& name,
                                             const model::DecoderSpec& spec);

}  // namespace kvasir::cli
