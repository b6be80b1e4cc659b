// What a plan is to suit, by name.
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

}  // namespace kvasir::compress
