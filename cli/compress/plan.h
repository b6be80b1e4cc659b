#pragma once

#include "absl/status/statusor.h"
#include "cli/compress/calibration.h"
#include "cli/compress/method.h"
#include "model/checkpoint/checkpoint.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::cli {

// MakePlan, and where the plan comes from written into it.
absl::StatusOr<kvasir::v1::KvPlan> PlanWithProvenance(
    const MethodFlags& method, const CalibrationFlags& calibration,
    const model::Checkpoint& checkpoint, const CalibrationInputs& inputs);

}  // namespace kvasir::cli
