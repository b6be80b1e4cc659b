// Creates the page of `kvasir inspect --html`: server/inspect/page.html
// with the report's data. It is one self-contained file, with light and
// dark colours.
#pragma once

#include <string>
#include <vector>

#include "server/inspect/evaluation.h"
#include "server/inspect/report.h"

namespace kvasir::cli {

// Returns the page. A script in it draws the report from JSON data, which the
// page contains. Without scripts, a browser shows the text of ReportToText.
// Names and texts are escaped in both.
std::string ReportToHtml(const InspectReport& report,
                         const std::vector<Evaluation>& evaluations);

}  // namespace kvasir::cli
