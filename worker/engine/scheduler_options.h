// Scheduling options that the operator sets.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/time/time.h"
#include "worker/engine/eviction_limits.h"
#include "worker/engine/preemption.h"

namespace kvasir::worker {

struct SchedulerOptions {
  uint32_t max_model_len = 0;   // prompt and output tokens together
  uint32_t max_num_seqs = 256;  // limit of the sequences in one step
  // Limit of the tokens in one step. At least max_num_seqs, so that every
  // running sequence can decode in every step.
  uint32_t max_batched_tokens = 2048;
  // How many requests may wait for their first step; more are refused. In an
  // Engine, 0 means that a request is accepted only if it can join the next
  // step. A Scheduler by itself needs at least 1.
  uint32_t max_queue = 1024;
  absl::Duration queue_timeout = absl::InfiniteDuration();
  // The measured rate of copies between the page pool and the host pool.
  double copy_bytes_per_second = kAssumedCopyBytesPerSecond;
  // Limits for the eviction budgets of requests. If EvictionLimits::groups is
  // empty, requests with a budget are refused.
  EvictionLimits eviction;
  std::vector<int32_t> eos_token_ids;
  int32_t vocab_size = 0;
};

}  // namespace kvasir::worker
