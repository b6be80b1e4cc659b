// Finds the model of a router that serves only one model, for protocols whose
// messages do not name a model.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "router/base/canonical.h"

namespace kvasir::router {

// Returns the served model with the first of its names. UNAVAILABLE if no
// worker has been reached yet; FAILED_PRECONDITION if the served names belong
// to models with different weights.
absl::StatusOr<ModelStatus> OnlyModel(const RequestRouter& router);

// Returns `count`, but at most the largest int32. A sum over many replicas may
// exceed it, and the protocol's fields have this type.
int32_t ToInt32(uint64_t count);

}  // namespace kvasir::router
