// Makes the page of `kvasir inspect --html`: server/inspect/page.html with the
// report's data. It is one self-contained file with light and dark colours.
#pragma once

#include <string>
#include <vector>

#include "server/inspect/evaluation.h"
#include "server/inspect/report.h"

namespace kvasir::cli {

// Returns the page. Its script draws it from a JSON object in a script element;
// without scripts the page shows ReportToText. Names and texts are escaped in
// both.
std::string ReportToHtml(const InspectReport& report,
                         const std::vector<Evaluation>& evaluations);

}  // namespace kvasir::cli
