// Between the wire messages of kvasir.v1 and the engine's plain structs.
#pragma once

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/kvasir/v1/worker.pb.h"
#include "worker/engine/engine_events.h"
#include "worker/engine/request.h"

namespace kvasir::worker {

// INVALID_ARGUMENT where the bytes are no token ids. Values are not judged
// here: ValidateRequest does that.
absl::StatusOr<Request> ToRequest(const kvasir::v1::GenerateRequest& from,
                                  absl::Time deadline);

kvasir::v1::LoadReport ToLoadReport(const LoadSnapshot& from);

// The status with the refusal as its payload (proto/refusal.h) where there is
// a reason.
absl::Status ToStatus(const Refusal& refusal);

}  // namespace kvasir::worker
