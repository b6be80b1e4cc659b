#include "compress/planner/plan_speed.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace kvasir::compress {
namespace {

// This model is fitted to the decode measurements of dense-8bit, rap-50-4bit
// and dense-bf16 in docs/performance.md. It differs from measurements by less
// than a fifth, or less than a quarter for plans with narrow runs of bits.
constexpr TimeModel kCpuTime = {0.028, 0.025, 0.0047};
// The model of an H100 that reaches half of the rates in its data sheet.
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
