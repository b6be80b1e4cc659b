// The model of a router that serves only one, for protocols whose messages name
// none.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "router/base/canonical.h"

namespace kvasir::router {

// Returns the model by the first of its names. UNAVAILABLE before a worker has
// been reached, FAILED_PRECONDITION if the names stand for models of different
// weights.
absl::StatusOr<ModelStatus> OnlyModel(const RequestRouter& router);

// Saturates: counts of many replicas may exceed a protocol's numbers.
int32_t ToInt32(uint64_t count);

}  // namespace kvasir::router
