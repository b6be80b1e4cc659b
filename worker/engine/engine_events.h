// Callbacks of the engine: for the owner of a request (EngineSink), for metrics
// (EngineObserver), and for watchers of the load (LoadListener).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "proto/kvasir/v1/worker.pb.h"
#include "worker/engine/request.h"

namespace kvasir::worker {

// Receives the events of one request.
// Threads: the engine's thread makes the calls, one at a time, without a lock.
//   A call must not block. It may call Engine::Abort.
class EngineSink {
 public:
  virtual ~EngineSink() = default;
  // The first call: the request is in the queue.
  virtual void OnAccepted(uint32_t prompt_tokens) = 0;
  // At least one token of one sample. The message is the caller's: it is valid
  // during the call only.
  virtual void OnTokens(const kvasir::v1::GenerateEvent::Tokens& tokens) = 0;
  // Exactly once for each sample, aborted ones included, unless OnFailed is
  // called instead. `last`: every sample has ended, and no further call
  // follows.
  virtual void OnFinished(const kvasir::v1::GenerateEvent::Finish& finish,
                          bool last) = 0;
  // The last call, instead of OnFinished for all samples that still run. Causes
  // are a deadline, a queue timeout, a drain and a failed executor.
  virtual void OnFailed(const Refusal& why) = 0;
};

struct LoadSnapshot {
  uint64_t step = 0;     // steps executed so far
  uint32_t running = 0;  // sequences in the batch
  uint32_t waiting = 0;  // requests queued, and sequences that were preempted
  uint64_t free_pages =
      0;  // held by no sequence; the prefix index may know them
  uint64_t total_pages = 0;
  bool draining = false;
  uint64_t queued_tokens = 0;  // to be prefilled for all waiting sequences

  friend bool operator==(const LoadSnapshot&, const LoadSnapshot&) = default;
};

// Threads: the engine's thread makes the calls, without a lock. A call must not
//   block.
class LoadListener {
 public:
  virtual ~LoadListener() = default;
  virtual void OnLoad(const LoadSnapshot& load) = 0;
};

struct StepStats {
  uint64_t step_id = 0;
  uint32_t decode_sequences = 0;
  uint32_t prefill_sequences = 0;
  uint32_t prefill_tokens = 0;
  uint32_t sampled_tokens = 0;
  uint32_t preemptions = 0;
  uint32_t preemptions_by_copy = 0;  // those of them that used the host pool
  // The scheduler's share: planning the step and handling its result.
  absl::Duration schedule;
  // From the step's Enqueue to its result. If steps are planned ahead, this
  // includes scheduling for the steps before and after it.
  absl::Duration execute;
  // One entry per token delivered in this step.
  absl::Span<const absl::Duration> time_to_first_token;
  absl::Span<const absl::Duration> inter_token;
  LoadSnapshot load;
};

// A request after its last sample has ended.
struct RequestSummary {
  std::string request_id;
  uint32_t attempt = 0;
  std::string tenant;
  // The reason of sample 0. Absent if the request failed: see `status`.
  std::optional<kvasir::v1::FinishReason> reason;
  absl::Status status;
  kvasir::v1::Refusal::Reason refusal =
      kvasir::v1::Refusal::REFUSAL_UNSPECIFIED;
  bool aborted = false;  // at least one sample was aborted
  uint32_t prompt_tokens = 0;
  uint32_t output_tokens = 0;  // of all samples
  uint32_t cached_tokens = 0;
  uint32_t preemptions = 0;
  // Times of sample 0. `prefill` is absent if the request ended before its
  // first step, `decode` if it ended before its first token.
  absl::Duration queue;
  std::optional<absl::Duration> prefill;
  std::optional<absl::Duration> decode;
  absl::Duration end_to_end;
};

// Receives what metrics count.
// Threads: the engine's thread makes the calls, except OnRefused, which any
//   thread makes. A call must not block.
class EngineObserver {
 public:
  virtual ~EngineObserver() = default;
  virtual void OnStep(const StepStats& /*step*/) {}
  // Once for each request that was accepted.
  virtual void OnRequestEnd(const RequestSummary& /*summary*/) {}
  // Submit refused a request.
  virtual void OnRefused(const Refusal& /*why*/) {}
};

}  // namespace kvasir::worker
