// Prints a step plan as text for logs and stall reports.
#pragma once

#include <string>

#include "proto/kvasir/v1/step_plan.pb.h"

namespace kvasir::worker {

// Returns one line for the step, and one for each of its evictions and
// sequences. Token ids are left out, because they reveal what users wrote.
std::string DumpPlan(const kvasir::v1::StepPlan& plan);

}  // namespace kvasir::worker
