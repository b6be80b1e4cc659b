// One word for the log why a request is refused: "expired", "rate". It goes
// with the status inside the router, and to no client.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace kvasir::router {

// OK stays OK.
void SetRefusalReason(absl::string_view reason, absl::Status* status);
// Empty: nobody has said.
std::string RefusalReasonOf(const absl::Status& status);

}  // namespace kvasir::router
