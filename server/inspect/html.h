// The page of `kvasir inspect --html`: cli/inspect/page.html with the report's
// figures in it. One file that needs nothing else, in light and dark.
#pragma once

#include <string>
#include <vector>

#include "server/inspect/evaluation.h"
#include "server/inspect/report.h"

namespace kvasir::cli {

// The page draws itself from one JSON object in a script element; without
// scripts it shows ReportToText. Names and texts stay inside of either.
std::string ReportToHtml(const InspectReport& report,
                         const std::vector<Evaluation>& evaluations);

}  // namespace kvasir::cli
