// What the operator sets about scheduling.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/time/time.h"
#include "worker/engine/eviction_limits.h"
#include "worker/engine/preemption.h"

namespace kvasir::worker {

struct SchedulerOptions {
  uint32_t max_model_len = 0;   // tokens of prompt and output together
  uint32_t max_num_seqs = 256;  // sequences in one step
  // Tokens in one step; at least max_num_seqs, so that every running sequence
  // can decode in every step.
  uint32_t max_batched_tokens = 2048;
  // Requests that wait for their first step; more are refused. 0: only what
  // finds a free seat is taken.
  uint32_t max_queue = 1024;
  absl::Duration queue_timeout = absl::InfiniteDuration();
  // Between the pool and the host pool, as measured.
  double copy_bytes_per_second = kAssumedCopyBytesPerSecond;
  // What requests may say of eviction; empty groups: nothing.
  EvictionLimits eviction;
  std::vector<int32_t> eos_token_ids;
  int32_t vocab_size = 0;
};

}  // namespace kvasir::worker
