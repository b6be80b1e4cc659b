// What a plan is to suit, and what its attention takes there.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace kvasir::compress {

enum class PlanSpeed {
  kStorage,  // fewest bytes: keys may be rebuilt, key and value share latents
  kCpu,      // absorbed forms, as fast as a dense cache by the model of time
  kGpu,
};
absl::StatusOr<PlanSpeed> ParsePlanSpeed(const std::string& name);
std::string PlanSpeedName(PlanSpeed speed);

// Nanoseconds of attention over one slot of one layer. Only ratios to a dense
// cache are looked at.
struct TimeModel {
  double byte_ns = 0;    // of a dense cache
  double number_ns = 0;  // a number taken out of its code
  double flop_ns = 0;
};
// Null where time does not matter.
const TimeModel* TimeOf(PlanSpeed speed);

}  // namespace kvasir::compress
