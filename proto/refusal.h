// A refusal of a request as an absl::Status. Its code is the gRPC status code,
// and its payload (kvasir.v1.Refusal) says whether another replica could take
// the request.
#pragma once

#include <optional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "proto/kvasir/v1/worker.pb.h"

namespace kvasir::proto {

// The key of the trailing metadata that holds a serialized kvasir.v1.Refusal.
inline constexpr char kRefusalMetadataKey[] = "kvasir-refusal-bin";

// Returns a refusal. The reason decides the code: RESOURCE_EXHAUSTED for
// RETRY_ELSEWHERE, INVALID_ARGUMENT for NEVER_FITS, UNAVAILABLE for DRAINING.
absl::Status RefusedError(kvasir::v1::Refusal::Reason reason,
                          absl::string_view detail);

// Returns the refusal in a status; nullopt if the status contains none.
std::optional<kvasir::v1::Refusal> RefusalOf(const absl::Status& status);

// Adds `refusal` to `*status` as its payload. Has no effect on an OK status.
void SetRefusal(const kvasir::v1::Refusal& refusal, absl::Status* status);

}  // namespace kvasir::proto
