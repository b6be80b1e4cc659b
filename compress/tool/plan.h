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
  // The planner's prediction; set only for method auto.
  std::optional<compress::AutoPrediction> prediction;
};

// Calls MakePlan or MakeAutoPlan and writes the provenance into the plan.
absl::StatusOr<MadePlan> PlanWithProvenance(const MethodFlags& method,
                                            const CalibrationFlags& calibration,
                                            const model::Checkpoint& checkpoint,
                                            const CalibrationInputs& inputs);

// Returns the content of the prediction file, PredictionJson with the plan's
// hash, if there is a prediction. summary/prediction.h reads such files.
std::optional<std::string> PredictionFileText(const MadePlan& made);

}  // namespace kvasir::cli
