#include "router/base/refusal_reason.h"

#include "absl/strings/cord.h"
#include "absl/types/optional.h"

namespace kvasir::router {
namespace {

constexpr char kPayloadUrl[] = "type.kvasir/refusal-reason";

}  // namespace

void SetRefusalReason(absl::string_view reason, absl::Status* status) {
  if (!status->ok()) status->SetPayload(kPayloadUrl, absl::Cord(reason));
}

std::string RefusalReasonOf(const absl::Status& status) {
  const absl::optional<absl::Cord> reason = status.GetPayload(kPayloadUrl);
  return reason.has_value() ? std::string(*reason) : "";
}

}  // namespace kvasir::router
