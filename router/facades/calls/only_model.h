// Finds the model of a router that serves only one, for protocols whose
// messages do not name a model.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "router/base/canonical.h"

namespace kvasir::router {

// Returns the served model, under the first of its names. UNAVAILABLE before a
// worker has been reached; FAILED_PRECONDITION if the served names belong to
// models with different weights.
absl::StatusOr<ModelStatus> OnlyModel(const RequestRouter& router);

// Returns `count`, or the largest int32 if it is larger, because the sum over
// many replicas may exceed the type of a protocol's field.
int32_t ToInt32(uint64_t count);

}  // namespace kvasir::router
