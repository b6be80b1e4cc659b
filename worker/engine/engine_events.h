// What the engine tells: to the owner of a request (EngineSink), to metrics
// (EngineObserver), to watchers of the load (LoadListener).
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

// Hears about one request.
// Threads: the engine's thread calls, one call at a time, no engine lock held.
// Must not block; may call Engine::Abort.
class EngineSink {
 public:
  virtual ~EngineSink() = default;
  // First call: the request is in the queue.
  virtual void OnAccepted(uint32_t prompt_tokens) = 0;
  // At least one token of one sample. The message is the caller's: it is valid
  // during the call only.
  virtual void OnTokens(const kvasir::v1::GenerateEvent::Tokens& tokens) = 0;
  // Exactly once per sample, aborted ones too, unless OnFailed comes. `last`:
  // no sample of the request runs any more, and no further call follows.
  virtual void OnFinished(const kvasir::v1::GenerateEvent::Finish& finish,
                          bool last) = 0;
  // Last call, for all samples that have not finished: deadline, queue timeout
  // or a broken executor.
  virtual void OnFailed(const Refusal& why) = 0;
};

struct LoadSnapshot {
  uint64_t step = 0;     // steps executed so far
  uint32_t running = 0;  // sequences in the batch
  uint32_t waiting = 0;  // requests queued, and sequences that were preempted
  uint64_t free_pages = 0;  // held by nobody, or only by the prefix index
  uint64_t total_pages = 0;
  bool draining = false;
  uint64_t queued_tokens = 0;  // to be prefilled, of all that wait

  friend bool operator==(const LoadSnapshot&, const LoadSnapshot&) = default;
};

// Threads: the engine's thread calls, no engine lock held. Must not block.
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
  uint32_t preemptions_by_copy = 0;  // of them: to the host pool
  // Planning it, and handling its result: the scheduler's share.
  absl::Duration schedule;
  // From its Enqueue to its result. Where steps are planned ahead the shares of
  // its neighbours lie in it.
  absl::Duration execute;
  // One entry per token delivered in this step.
  absl::Span<const absl::Duration> time_to_first_token;
  absl::Span<const absl::Duration> inter_token;
  LoadSnapshot load;
};

// Once per request, when its last sample has ended.
struct RequestSummary {
  std::string request_id;
  uint32_t attempt = 0;
  std::string tenant;
  // Of sample 0; absent: it failed, see `status`.
  std::optional<kvasir::v1::FinishReason> reason;
  absl::Status status;
  kvasir::v1::Refusal::Reason refusal =
      kvasir::v1::Refusal::REFUSAL_UNSPECIFIED;
  bool aborted = false;  // at least one sample was
  uint32_t prompt_tokens = 0;
  uint32_t output_tokens = 0;  // of all samples
  uint32_t cached_tokens = 0;
  uint32_t preemptions = 0;
  // Of sample 0. Absent: the request ended before its first step, or before its
  // first token.
  absl::Duration queue;
  std::optional<absl::Duration> prefill;
  std::optional<absl::Duration> decode;
  absl::Duration end_to_end;
};

// Where metrics are bound.
// Threads: the engine's thread calls, except OnRefused, which any thread may
// call. Must not block.
class EngineObserver {
 public:
  virtual ~EngineObserver() = default;
  virtual void OnStep(const StepStats& /*step*/) {}
  virtual void OnRequestEnd(const RequestSummary& /*summary*/) {}
  // Submit said no.
  virtual void OnRefused(const Refusal& /*why*/) {}
};

}  // namespace kvasir::worker
