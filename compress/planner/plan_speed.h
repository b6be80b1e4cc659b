// The machine that a plan should suit, and the time of its attention there.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace kvasir::compress {

enum class PlanSpeed {
  kStorage,  // Fewest bytes: keys may be rebuilt, and key and value may share
             // latents.
  kCpu,      // absorbed forms, as fast as a dense cache by the model of time
  kGpu,
};
absl::StatusOr<PlanSpeed> ParsePlanSpeed(const std::string& name);
std::string PlanSpeedName(PlanSpeed speed);

// Nanoseconds of attention over one slot of one layer. Only ratios to a dense
// cache are used.
struct TimeModel {
  double byte_ns = 0;    // of a dense cache
  double number_ns = 0;  // for decoding one number
  double flop_ns = 0;
};
// Null if time does not matter.
const TimeModel* TimeOf(PlanSpeed speed);

}  // namespace kvasir::compress
