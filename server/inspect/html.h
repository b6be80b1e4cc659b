// Makes the page of `kvasir inspect --html`: server/inspect/page.html with the
// report's data. It is one self-contained file with light and dark colours.
#pragma once

#include <string>
#include <vector>

#include "server/inspect/evaluation.h"
#include "server/inspect/report.h"

namespace kvasir::cli {

// Returns the page. A script draws the report from JSON data that the page
// contains. In a browser without scripts, the page shows the text of
// ReportToText. Names and texts are escaped in the JSON and in the text.
std::string ReportToHtml(const InspectReport& report,
                         const std::vector<Evaluation>& evaluations);

}  // namespace kvasir::cli
