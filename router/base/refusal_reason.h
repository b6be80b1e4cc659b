// One word for the access log that says why a request is refused: "expired",
// "rate". It travels with the status inside the router and is never sent to a
// client.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace kvasir::router {

// Has no effect on OK.
void SetRefusalReason(absl::string_view reason, absl::Status* status);
// Returns "" if none was set.
std::string RefusalReasonOf(const absl::Status& status);

}  // namespace kvasir::router
