// Checks the sizes of collective calls. Implementations of Collective
// make these checks before they send anything.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "plan/tp_shard.h"

namespace kvasir::worker {

// Returns the size in bytes of a float32 matrix [rows, columns]. Matrices of
// the other types of activations are not larger. INVALID_ARGUMENT if a size is
// negative or the product overflows.
absl::StatusOr<int64_t> CollectiveBytes(const char* call, int64_t rows,
                                        int64_t columns);

// Checks AllGather's first_columns. INVALID_ARGUMENT if they do not divide the
// columns among the ranks.
absl::Status CheckFirstColumns(plan::TpShard shard,
                               absl::Span<const int64_t> first_columns);

}  // namespace kvasir::worker
