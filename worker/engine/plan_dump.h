// A step plan as text for logs and reports.
#pragma once

#include <string>

#include "proto/kvasir/v1/step_plan.pb.h"

namespace kvasir::worker {

// One line per sequence: ids, counts, positions, pages. Token ids are left out,
// because users wrote them.
std::string DumpPlan(const kvasir::v1::StepPlan& plan);

}  // namespace kvasir::worker
