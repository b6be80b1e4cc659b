// The machine for which a plan is made, and a model of the time that attention
// takes there.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace kvasir::compress {

enum class PlanSpeed {
  // fewest bytes; time does not matter
  kStorage,
  // by TimeModel, attention is no slower than with a dense cache, if possible
  kCpu,
  kGpu,
};
absl::StatusOr<PlanSpeed> ParsePlanSpeed(const std::string& name);
std::string PlanSpeedName(PlanSpeed speed);

// Nanoseconds that attention takes for one cached token in one layer. Only the
// ratio to the time of a dense cache is used.
struct TimeModel {
  double byte_ns = 0;       // to read one byte of a dense cache
  double flop_ns = 0;       // for an operation on a number of a dense cache
  double code_ns = 0;       // to unpack one code
  double code_flop_ns = 0;  // for an operation on a code
};
// Returns the time model for this speed; null for kStorage, for which time does
// not matter.
const TimeModel* TimeOf(PlanSpeed speed);

}  // namespace kvasir::compress
