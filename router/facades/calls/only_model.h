// The model of a router that serves one, for protocols whose requests or
// answers name none.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "router/base/canonical.h"

namespace kvasir::router {

// The first of its names. UNAVAILABLE before a worker has been reached,
// FAILED_PRECONDITION where names stand for models of different weights.
absl::StatusOr<ModelStatus> OnlyModel(const RequestRouter& router);

// Counts of many replicas may be more than a protocol's numbers hold.
int32_t ToInt32(uint64_t count);

}  // namespace kvasir::router
