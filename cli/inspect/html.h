// The page of `kvasir inspect --html`: one file that needs nothing else, in
// light and dark.
#pragma once

#include <string>
#include <vector>

#include "cli/inspect/evaluation.h"
#include "cli/inspect/report.h"

namespace kvasir::cli {

// HTML that is well-formed XML too. All names and texts are escaped.
std::string ReportToHtml(const InspectReport& report,
                         const std::vector<Evaluation>& evaluations);

}  // namespace kvasir::cli
