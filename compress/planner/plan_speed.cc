#include "compress/planner/plan_speed.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace kvasir::compress {

absl::StatusOr<PlanSpeed> ParsePlanSpeed(const std::string& name) {
  for (const PlanSpeed speed :
       {PlanSpeed::kStorage, PlanSpeed::kCpu, PlanSpeed::kGpu}) {
    if (PlanSpeedName(speed) == name) return speed;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown speed \"", name, "\": want storage, cpu or gpu"));
}

std::string PlanSpeedName(PlanSpeed speed) {
  switch (speed) {
    case PlanSpeed::kStorage:
      return "storage";
    case PlanSpeed::kCpu:
      return "cpu";
    case PlanSpeed::kGpu:
      return "gpu";
  }
  return "";
}

}  // namespace kvasir::compress
