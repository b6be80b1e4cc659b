#include "compress/planner/plan_speed.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace kvasir::compress {
namespace {

// docs/performance.md, decode rows of dense-8bit, rap-50-4bit and dense-bf16 of
// the three shapes, to which they fit within a fifth; to plans with narrow runs
// within a quarter.
constexpr TimeModel kCpuTime = {0.028, 0.025, 0.0047};
// An H100's data sheet at half of its rates.
constexpr TimeModel kGpuTime = {0.0006, 0.0001, 0.0000021};

}  // namespace

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

const TimeModel* TimeOf(PlanSpeed speed) {
  switch (speed) {
    case PlanSpeed::kStorage:
      return nullptr;
    case PlanSpeed::kCpu:
      return &kCpuTime;
    case PlanSpeed::kGpu:
      return &kGpuTime;
  }
  return nullptr;
}

}  // namespace kvasir::compress
