// The interface between facades and the router: one request, one sink for its
// tokens, one handle to cancel it. It knows only token ids; text, stop strings
// and chat templates belong to facades.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/eviction_budget.h"
#include "proto/kvasir/v1/worker.pb.h"
#include "proto/refusal.h"
#include "proto/sampling.h"
#include "proto/token_bytes.h"
#include "router/base/byte_budget.h"

namespace kvasir::router {

using proto::NeutralSampling;
using proto::TokenBytes;

struct CanonicalRequest {
  // The name that the client asked for. An empty one is refused: NOT_FOUND.
  std::string model;
  // The client's own id, for the access log. Need not be unique. The router
  // makes the id that is used inside Kvasir (handle->id()).
  std::string client_request_id;
  std::string tenant;
  // The tenant's caller (one of several), for the access log.
  std::string caller;
  // Separates prefix caches. Empty: the cache is shared on purpose.
  std::string cache_salt;
  TokenBytes prompt;
  // Start from NeutralSampling(). max_tokens 0: the operator's default, limited
  // by the model's length. `seed` in it is ignored; use the field below.
  kvasir::v1::SamplingParams sampling;
  // Absent: the router draws one, because the worker always needs a seed.
  std::optional<uint64_t> seed;
  absl::Time deadline = absl::InfiniteFuture();
  // How long the request may wait before its first step; after that it ends
  // with DEADLINE_EXCEEDED. Zero: the operator's default applies, after which
  // it is refused.
  absl::Duration queue_timeout = absl::ZeroDuration();
  // Slots that eviction keeps. Absent: the served plan decides. The worker
  // checks the value.
  std::optional<proto::EvictionBudget> eviction_budget;
  // Lower values run first.
  int32_t priority = 0;
  // The client sees nothing before the whole answer. If its worker is lost,
  // another continues from the tokens that have been received.
  bool folded = false;
  // The W3C trace context as received; empty if there was none.
  std::string traceparent;
  // The request's share of the router's memory. The facade takes it when the
  // request arrives; tokens add to it. May be null.
  std::shared_ptr<ByteShare> bytes;
  // For the access log: "kserve", "vllm", ...
  std::string facade;
  std::string peer;
};

// Returns the largest n that a model's workers accept. Sinks allocate memory by
// n, so `ours` bounds the workers' value.
inline uint32_t LargestN(const kvasir::v1::WorkerInfo& info, uint32_t ours) {
  return info.max_n() == 0 ? ours : std::min(info.max_n(), ours);
}

// Receives one request's output. Facades implement it. It is a shared_ptr
// because router and facade end at different times; the router drops its
// reference after OnDone has returned.
//
// Order: [OnAccepted] (OnTokens | OnFinish)* OnDone. OnDone comes exactly once
// and last, whatever happens, Cancel included.
//
// Threads: one call at a time per request, on the router's few threads. An
//   implementation converts, enqueues and returns; it never blocks and never
//   tokenizes. Calls may begin before Submit has returned, but never run inside
//   Submit or Cancel, so a sink may hold its own lock around either. Cancel may
//   be called from inside a callback.
//
// Backpressure: none reaches the worker, so that a slow reader never holds
// pages. The request runs to its end, and its tokens wait in the facade's own
// queue. The facade bounds that queue in bytes; over the bound it resets its
// client's stream and calls Cancel(kSlowReader).
class RequestSink {
 public:
  virtual ~RequestSink() = default;

  // A worker has put the request into its queue. At most once.
  virtual void OnAccepted(uint32_t prompt_tokens) = 0;
  // New tokens of one sample (tokens.index()), in order, never repeated.
  virtual void OnTokens(const kvasir::v1::GenerateEvent::Tokens& tokens) = 0;
  // A sample has ended. Called once per sample before an OnDone with OK.
  virtual void OnFinish(const kvasir::v1::GenerateEvent::Finish& finish) = 0;
  // OK: every sample has had its OnFinish. Otherwise the reason: CANCELLED
  // after Cancel, DEADLINE_EXCEEDED, UNAVAILABLE if the worker was lost,
  // INTERNAL if the worker broke the contract, or a refusal (see
  // proto::RefusalOf); DRAINING after Cancel(kShutdown).
  virtual void OnDone(const absl::Status& status) = 0;
};

enum class CancelReason {
  // The client went away, reset its call or asked to stop.
  kClient,
  // The facade needs no more tokens (a stop string matched). Logged and counted
  // as finished with reason "stop", not as an abort.
  kStopString,
  // The facade's queue is over its byte bound.
  kSlowReader,
  // The server is shutting down.
  kShutdown,
};

// Threads: any thread. Dropping the handle does not cancel.
class RequestHandle {
 public:
  virtual ~RequestHandle() = default;

  // The id in logs, traces and at the worker. Unique.
  virtual const std::string& id() const = 0;
  // Idempotent: the first reason counts, and after OnDone it has no effect. A
  // callback that is already running may finish; after it only OnDone comes.
  // The worker sees its call reset within milliseconds.
  virtual void Cancel(CancelReason reason) = 0;
};

// The load of all replicas that accept requests: their last reports, and what
// they were sent since.
struct ModelLoad {
  uint64_t running = 0;
  uint64_t waiting = 0;
  uint64_t max_num_seqs = 0;
  // In the cache, in whole pages.
  uint64_t used_tokens = 0;
  uint64_t total_tokens = 0;
};

// A model as clients see it.
struct ModelStatus {
  std::string name;
  // At least one of its replicas accepts requests now.
  bool ready = false;
  uint32_t num_replicas = 0;
  uint32_t num_ready_replicas = 0;
  ModelLoad load;
  // The values that its replicas agree on (api_version, weights_id,
  // max_model_len, vocab_size, eos_token_ids, tokenizer_hash, ...). Unset until
  // one of them has been reached.
  std::optional<kvasir::v1::WorkerInfo> info;
};

enum class RouterState { kStarting, kReady, kDraining };

struct RouterHealth {
  RouterState state = RouterState::kStarting;
  // The router is not draining, and every model has a ready replica.
  bool ready = false;
  // A text that says why it is not ready: "tiny: 0 of 2 replicas ready
  // (127.0.0.1:9001: ...)".
  std::string detail;
};

// Threads: any thread.
class RequestRouter {
 public:
  virtual ~RequestRouter() = default;

  // Starts a request. An error is a refusal before anything started; the sink
  // is never called then. NOT_FOUND (unknown model), INVALID_ARGUMENT (values,
  // with the limits; NEVER_FITS if a prompt exceeds the model's length),
  // RESOURCE_EXHAUSTED (the router's queue is full), UNAVAILABLE (no replica,
  // or draining), DEADLINE_EXCEEDED (already past).
  virtual absl::StatusOr<std::shared_ptr<RequestHandle>> Submit(
      CanonicalRequest request, std::shared_ptr<RequestSink> sink) = 0;

  // Logs and counts a request that a facade has refused by itself, like one
  // that Submit refuses.
  virtual void LogRefused(CanonicalRequest request,
                          const absl::Status& why) = 0;

  virtual std::vector<ModelStatus> Models() const = 0;
  // NOT_FOUND lists the known names.
  virtual absl::StatusOr<ModelStatus> Model(const std::string& name) const = 0;
  virtual RouterHealth Health() const = 0;
};

}  // namespace kvasir::router
