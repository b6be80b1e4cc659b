// Converts between the messages of kvasir.v1 and the engine's plain structs.
#pragma once

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/kvasir/v1/worker.pb.h"
#include "worker/engine/engine_events.h"
#include "worker/engine/request.h"

namespace kvasir::worker {

// INVALID_ARGUMENT if the bytes of a token field are not a whole number of
// token ids. The values themselves are checked later, by ValidateRequest.
absl::StatusOr<Request> ToRequest(const kvasir::v1::GenerateRequest& from,
                                  absl::Time deadline);

kvasir::v1::LoadReport ToLoadReport(const LoadSnapshot& from);

// Returns the refusal's status. If the refusal has a reason, the status carries
// it as a payload (proto/refusal.h).
absl::Status ToStatus(const Refusal& refusal);

}  // namespace kvasir::worker
