// What every collective refuses before anything is sent.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "plan/tp_shard.h"

namespace kvasir::worker {

// Bytes of so many numbers of float32, which no type exceeds; INVALID_ARGUMENT
// for sizes that cannot be.
absl::StatusOr<int64_t> CollectiveBytes(const char* call, int64_t rows,
                                        int64_t columns);

// Of an AllGather: INVALID_ARGUMENT for what are no columns of the ranks.
absl::Status CheckFirstColumns(plan::TpShard shard,
                               absl::Span<const int64_t> first_columns);

}  // namespace kvasir::worker
