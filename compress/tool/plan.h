#pragma once

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "compress/tool/calibration.h"
#include "compress/tool/method.h"
#include "model/checkpoint/checkpoint.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::cli {

struct MadePlan {
  kvasir::v1::KvPlan plan;
  // The prediction of the planner of method auto.
  std::optional<compress::AutoPrediction> prediction;
};

// Calls MakePlan or MakeAutoPlan and writes the provenance into the plan.
absl::StatusOr<MadePlan> PlanWithProvenance(const MethodFlags& method,
                                            const CalibrationFlags& calibration,
                                            const model::Checkpoint& checkpoint,
                                            const CalibrationInputs& inputs);

// The text of the prediction's file, if there is a prediction: PredictionJson
// and the plan's hash. summary/prediction.h reads it.
std::optional<std::string> PredictionFileText(const MadePlan& made);

}  // namespace kvasir::cli
