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
  // What the planner of method auto says of it.
  std::optional<compress::AutoPrediction> prediction;
};

// MakePlan or MakeAutoPlan, and where the plan comes from written into it.
absl::StatusOr<MadePlan> PlanWithProvenance(const MethodFlags& method,
                                            const CalibrationFlags& calibration,
                                            const model::Checkpoint& checkpoint,
                                            const CalibrationInputs& inputs);

// The file of the prediction, if there is one: PredictionJson, and which plan
// it is of (cli/prediction.h reads it).
std::optional<std::string> PredictionFileText(const MadePlan& made);

}  // namespace kvasir::cli
