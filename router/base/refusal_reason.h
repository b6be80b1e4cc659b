// One word for the access log that says why a request is refused, for example
// "expired" or "rate". It is a payload of the status. Only the router sees it;
// it is never sent to a client.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace kvasir::router {

// Adds the reason to `status`. Has no effect on OK.
void SetRefusalReason(absl::string_view reason, absl::Status* status);
// Returns the reason in `status`, or "" if it has none.
std::string RefusalReasonOf(const absl::Status& status);

}  // namespace kvasir::router
