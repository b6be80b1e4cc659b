#include "compress/planner/plan_speed.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace kvasir::compress {
namespace {

// This model is fitted to `kvasir bench attention` at 16384 tokens, for the
// shapes llama-2-7b, llama-3-8b and tinyllama-1.1b (1, 4 and 8 query heads for
// each KV head), on two cores of an Intel CPU with AVX-512 that read 28 GB/s
// (2026-11-29). For dense-bf16, rotated-4bit and rotated-3bit it differs from
// the measured times by less than a fifth in nearly all runs. dense-8bit took
// up to 1.4 times as long, and rap-50-4bit with 8 heads 1.7 times.
constexpr TimeModel kCpuTime = {.byte_ns = 0.045,
                                .flop_ns = 0.0035,
                                .code_ns = 0.030,
                                .code_flop_ns = 0.0063};
// The model of an H100 that reaches half of the rates in its data sheet.
constexpr TimeModel kGpuTime = {.byte_ns = 0.0006,
                                .flop_ns = 0.0000021,
                                .code_ns = 0.0001,
                                .code_flop_ns = 0.0000021};

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
