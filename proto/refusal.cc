#include "proto/refusal.h"

#include <string>

#include "absl/strings/cord.h"

namespace kvasir::proto {
namespace {

constexpr char kPayloadUrl[] = "type.kvasir/kvasir.v1.Refusal";

absl::StatusCode CodeOf(kvasir::v1::Refusal::Reason reason) {
  switch (reason) {
    case kvasir::v1::Refusal::RETRY_ELSEWHERE:
      return absl::StatusCode::kResourceExhausted;
    case kvasir::v1::Refusal::NEVER_FITS:
      return absl::StatusCode::kInvalidArgument;
    case kvasir::v1::Refusal::DRAINING:
      return absl::StatusCode::kUnavailable;
    default:
      return absl::StatusCode::kUnknown;
  }
}

}  // namespace

absl::Status RefusedError(kvasir::v1::Refusal::Reason reason,
                          absl::string_view detail) {
  kvasir::v1::Refusal refusal;
  refusal.set_reason(reason);
  refusal.set_detail(std::string(detail));
  absl::Status status(CodeOf(reason), detail);
  SetRefusal(refusal, &status);
  return status;
}

std::optional<kvasir::v1::Refusal> RefusalOf(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(kPayloadUrl);
  if (!payload.has_value()) return std::nullopt;
  kvasir::v1::Refusal refusal;
  if (!refusal.ParseFromString(std::string(*payload))) return std::nullopt;
  return refusal;
}

void SetRefusal(const kvasir::v1::Refusal& refusal, absl::Status* status) {
  if (status->ok()) return;
  status->SetPayload(kPayloadUrl, absl::Cord(refusal.SerializeAsString()));
}

}  // namespace kvasir::proto
