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
  uint32_t steps = 2000;  // timed; a tenth as many run before, to warm up
  // Bytes per token of the model whose pool is simulated, for the share of
  // metadata. The default is 22 layers with 4 KV heads of 64, in bf16.
  int64_t kv_bytes_per_token = 22 * 2 * 4 * 64 * 2;
};

struct SchedulerBenchResult {
  double step_us = 0.0;  // median of Schedule + Apply
  double step_p99_us = 0.0;
  double schedule_us = 0.0;  // medians of the parts
  double apply_us = 0.0;
  // Median of ScheduleAhead, over as many steps, each of which is planned while
  // the previous one runs.
  double ahead_us = 0.0;
  int64_t pool_bytes = 0;
  int64_t metadata_bytes = 0;
  double metadata_share = 0.0;  // metadata_bytes / pool_bytes
};

// INVALID_ARGUMENT for sizes without a batch.
absl::StatusOr<SchedulerBenchResult> RunSchedulerBench(
    const SchedulerBenchOptions& options);

}  // namespace kvasir::worker
