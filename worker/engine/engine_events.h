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
//   A call must not block, but may call Engine::Abort.
class EngineSink {
 public:
  virtual ~EngineSink() = default;
  // The first call for a request, which has just been put in the queue.
  virtual void OnAccepted(uint32_t prompt_tokens) = 0;
  // Delivers one or more tokens of one sample. The engine reuses the message
  // after the call, so copy what must be kept.
  virtual void OnTokens(const kvasir::v1::GenerateEvent::Tokens& tokens) = 0;
  // A sample has ended, possibly by an abort. Called exactly once for each
  // sample, unless OnFailed is called instead. `last` is true for the request's
  // last sample; this is then the sink's last call.
  virtual void OnFinished(const kvasir::v1::GenerateEvent::Finish& finish,
                          bool last) = 0;
  // The request failed, for example because its deadline passed or the executor
  // failed. This is the last call; samples that have not finished get no
  // OnFinished.
  virtual void OnFailed(const Refusal& why) = 0;
};

struct LoadSnapshot {
  uint64_t step = 0;     // steps executed so far
  uint32_t running = 0;  // sequences in the batch
  uint32_t waiting = 0;  // queued requests and preempted sequences
  // Pages that no sequence holds. Some of them may contain cached prefixes.
  uint64_t free_pages = 0;
  uint64_t total_pages = 0;
  bool draining = false;
  uint64_t queued_tokens = 0;  // tokens to prefill for waiting sequences
  // If there is work and no step finishes for so long, the engine hangs.
  uint32_t step_limit_ms = 0;

  friend bool operator==(const LoadSnapshot&, const LoadSnapshot&) = default;
};

// Receives the engine's load (ServedEngine::SubscribeLoad).
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
  uint32_t preemptions_by_copy = 0;  // included in `preemptions`
  // Time that the scheduler spent on planning the step and on handling its
  // result.
  absl::Duration schedule;
  // Time from the step's Enqueue until its result. If steps are planned ahead,
  // the scheduler handles the previous step and plans the next one during this
  // time.
  absl::Duration execute;
  // Each token delivered in this step has one entry: the first token of a
  // sample in time_to_first_token, any other token in inter_token.
  absl::Span<const absl::Duration> time_to_first_token;
  absl::Span<const absl::Duration> inter_token;
  LoadSnapshot load;
};

// Describes a request that has ended.
struct RequestSummary {
  std::string request_id;
  uint32_t attempt = 0;
  std::string tenant;
  // Why sample 0 ended. Absent if the request failed with `status`.
  std::optional<kvasir::v1::FinishReason> reason;
  absl::Status status;
  kvasir::v1::Refusal::Reason refusal =
      kvasir::v1::Refusal::REFUSAL_UNSPECIFIED;
  bool aborted = false;  // at least one sample was aborted
  uint32_t prompt_tokens = 0;
  uint32_t output_tokens = 0;  // sum over all samples
  uint32_t cached_tokens = 0;
  uint32_t preemptions = 0;
  // How long sample 0 spent in each phase. If the request ended before its
  // first step, `prefill` is absent. If it ended before its first token,
  // `decode` is absent.
  absl::Duration queue;
  std::optional<absl::Duration> prefill;
  std::optional<absl::Duration> decode;
  absl::Duration end_to_end;
};

// Receives the events that metrics count.
// Threads: the engine's thread makes the calls, except OnRefused, which any
//   thread may call. A call must not block.
class EngineObserver {
 public:
  virtual ~EngineObserver() = default;
  virtual void OnStep(const StepStats& /*step*/) {}
  // Called once for each accepted request, after it has ended.
  virtual void OnRequestEnd(const RequestSummary& /*summary*/) {}
  // Called when Submit refuses a request.
  virtual void OnRefused(const Refusal& /*why*/) {}
};

}  // namespace kvasir::worker
