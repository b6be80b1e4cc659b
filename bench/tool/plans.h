// Plans that benchmarks are told by --plan.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "model/shapes/decoder_spec.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::cli {

// `name` is a file if it ends in .json, else one of plan::PlanPresets. A file's
// plan of another shape is spread over this one (spread_plan.h). Errors
// name it.
absl::StatusOr<kvasir::v1::KvPlan> PlanNamed(const std::string& name,
                                             const model::DecoderSpec& spec);

}  // namespace kvasir::cli
