// The page of `kvasir inspect --html`: server/inspect/page.html with the
// report's figures. It is one self-contained file with light and dark colours.
#pragma once

#include <string>
#include <vector>

#include "server/inspect/evaluation.h"
#include "server/inspect/report.h"

namespace kvasir::cli {

// The page draws itself from one JSON object in a script element; without
// scripts it shows ReportToText. Names and texts are escaped for both.
std::string ReportToHtml(const InspectReport& report,
                         const std::vector<Evaluation>& evaluations);

}  // namespace kvasir::cli
