// Divides the rows of elementwise ops among threads.
#pragma once

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "kernels/device/stream.h"

namespace kvasir::kernels {

// Calls function(begin, end, thread) for parts of [0, num_rows), on several
// threads. If there is little work, only the calling thread does it. Waking
// other threads takes a few microseconds, but computing a number takes only
// about a nanosecond.
inline void ForRows(
    CpuStream& stream, int64_t num_rows, int64_t numbers_per_row,
    absl::FunctionRef<void(int64_t begin, int64_t end, int thread)> function) {
  constexpr int64_t kWorthWaking = 16384;
  if (num_rows <= 0) return;
  if (num_rows * numbers_per_row < kWorthWaking) {
    function(0, num_rows, 0);
  } else {
    stream.pool().ForRanges(num_rows, function);
  }
}

}  // namespace kvasir::kernels
