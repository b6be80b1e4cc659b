// Measures the scheduler's own time: planning and result handling of a full
// batch of long sequences, with an executor that does nothing.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"

namespace kvasir::worker {

struct SchedulerBenchOptions {
  uint32_t num_sequences = 256;
  uint32_t context_tokens = 4096;
  uint32_t page_tokens = 64;
  // timed steps; a tenth as many run before them to warm up
  uint32_t steps = 2000;
  // The bytes per token of the simulated model's cache, with which the size of
  // metadata is compared. The default is 22 layers * (key and value) * 4 KV
  // heads * 64 dimensions * 2 bytes.
  int64_t kv_bytes_per_token = 22 * 2 * 4 * 64 * 2;
};

struct SchedulerBenchResult {
  double step_us = 0.0;  // median of Schedule + Apply
  double step_p99_us = 0.0;
  double schedule_us = 0.0;  // the medians of the two parts of step_us
  double apply_us = 0.0;
  // The median time of ScheduleAhead over another `steps` steps. Each step is
  // planned while the previous one runs.
  double ahead_us = 0.0;
  int64_t pool_bytes = 0;
  int64_t metadata_bytes = 0;
  double metadata_share = 0.0;  // metadata_bytes / pool_bytes
};

// Returns INVALID_ARGUMENT if a size is 0 or there are fewer than 10 steps.
absl::StatusOr<SchedulerBenchResult> RunSchedulerBench(
    const SchedulerBenchOptions& options);

}  // namespace kvasir::worker
