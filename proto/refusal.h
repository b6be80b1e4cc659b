// A refused request as an absl::Status. The code is the gRPC status code, and
// the payload says whether another replica could take the request.
#pragma once

#include <optional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "proto/kvasir/v1/worker.pb.h"

namespace kvasir::proto {

// Trailing metadata beside the gRPC status: a serialized kvasir.v1.Refusal.
inline constexpr char kRefusalMetadataKey[] = "kvasir-refusal-bin";

// The code that goes with each reason: RETRY_ELSEWHERE is RESOURCE_EXHAUSTED,
// NEVER_FITS is INVALID_ARGUMENT, DRAINING is UNAVAILABLE.
absl::Status RefusedError(kvasir::v1::Refusal::Reason reason,
                          absl::string_view detail);

// The refusal that a status carries. nullopt: the status is no refusal.
std::optional<kvasir::v1::Refusal> RefusalOf(const absl::Status& status);

// Attaches a refusal to a status that came with one. OK stays OK.
void SetRefusal(const kvasir::v1::Refusal& refusal, absl::Status* status);

}  // namespace kvasir::proto
