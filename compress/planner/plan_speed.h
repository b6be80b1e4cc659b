// The machine for which a plan is made, and a model of the time that attention
// takes there.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace kvasir::compress {

enum class PlanSpeed {
  kStorage,  // Fewest bytes: keys may be rebuilt, and key and value may share
             // latents.
  kCpu,      // absorbed forms only; by the TimeModel as fast as a dense cache
  kGpu,
};
absl::StatusOr<PlanSpeed> ParsePlanSpeed(const std::string& name);
std::string PlanSpeedName(PlanSpeed speed);

// Nanoseconds that attention takes for one slot of one layer. Only the ratio to
// the time of a dense cache is used.
struct TimeModel {
  double byte_ns = 0;    // of a dense cache
  double number_ns = 0;  // for decoding one number
  double flop_ns = 0;
};
// Returns null for kStorage, where time does not matter.
const TimeModel* TimeOf(PlanSpeed speed);

}  // namespace kvasir::compress
