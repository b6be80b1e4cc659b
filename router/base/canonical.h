// What every facade turns its wire protocol into, and what it gets back: one
// request, one sink for its tokens, one handle to cancel it. Token ids only;
// text, stop strings and chat templates are the facade's.
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
  // The name that the client asked for. Empty is refused: NOT_FOUND.
  std::string model;
  // The client's own id, for the access log. Need not be unique. The id used
  // inside Kvasir is made by the router (handle->id()).
  std::string client_request_id;
  std::string tenant;
  // Of the tenant's callers: for the access log.
  std::string caller;
  // Separates prefix caches; empty: shared on purpose.
  std::string cache_salt;
  TokenBytes prompt;
  // Start from NeutralSampling(). max_tokens 0: the operator's default, cut to
  // what the model's length leaves. `seed` here is ignored: see below.
  kvasir::v1::SamplingParams sampling;
  // Absent: the router draws one (the worker always gets a seed).
  std::optional<uint64_t> seed;
  absl::Time deadline = absl::InfiniteFuture();
  // How long it may wait before its first step, after which it ends with
  // DEADLINE_EXCEEDED; zero: the operator's default, a refusal.
  absl::Duration queue_timeout = absl::ZeroDuration();
  // Slots that stay of what evicts; absent: as the served plan says. Judged by
  // the worker.
  std::optional<proto::EvictionBudget> eviction_budget;
  // Lower runs first.
  int32_t priority = 0;
  // The client sees nothing before the whole answer: where a worker is lost,
  // another goes on from the tokens that there are.
  bool folded = false;
  // W3C trace context as received, empty if none.
  std::string traceparent;
  // Its part of the router's memory, taken by the facade as the request came;
  // grows by its tokens. May be null.
  std::shared_ptr<ByteShare> bytes;
  // For the access log: "kserve", "vllm", ...
  std::string facade;
  std::string peer;
};

// The most samples that a model's workers admit; what is sized by n here must
// hold as many, so `ours` bounds what they tell.
inline uint32_t LargestN(const kvasir::v1::WorkerInfo& info, uint32_t ours) {
  return info.max_n() == 0 ? ours : std::min(info.max_n(), ours);
}

// Receives one request's output. Implemented by facades; a shared_ptr because
// router and facade end at different times. The router drops its reference
// when OnDone has returned.
//
// Order: [OnAccepted] (OnTokens | OnFinish)* OnDone. OnDone comes exactly once
// and last, whatever happens, Cancel included.
//
// Threads: one call at a time per request, on the router's threads, which are
// few: convert, enqueue and return; never block, never tokenize. Calls may
// begin before Submit has returned, but never run inside Submit or Cancel, so
// a sink may hold its own lock around either. Cancel may be called from inside
// a callback.
//
// Backpressure: there is none towards the worker, so that a slow reader never
// holds pages: the request runs to its end and its tokens wait in the facade's
// own queue. The facade bounds that queue by bytes; over the bound it resets
// its client's stream and calls Cancel(kSlowReader).
class RequestSink {
 public:
  virtual ~RequestSink() = default;

  // A worker has admitted the request to its queue. At most once.
  virtual void OnAccepted(uint32_t prompt_tokens) = 0;
  // New tokens of one sample (tokens.index()), in order, never repeated.
  virtual void OnTokens(const kvasir::v1::GenerateEvent::Tokens& tokens) = 0;
  // A sample has ended; once per sample (n of them before an OK OnDone).
  virtual void OnFinish(const kvasir::v1::GenerateEvent::Finish& finish) = 0;
  // OK: every sample has had its OnFinish. Otherwise why the request ended:
  // CANCELLED after Cancel, DEADLINE_EXCEEDED, UNAVAILABLE when its worker was
  // lost, INTERNAL when its worker broke the contract, or a refusal
  // (proto::RefusalOf says which): DRAINING after Cancel(kShutdown).
  virtual void OnDone(const absl::Status& status) = 0;
};

enum class CancelReason {
  // The client went away, reset its call or asked to stop.
  kClient,
  // The facade has all it wants (a stop string matched): logged and counted as
  // finished with reason "stop", not as an abort.
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
  // Idempotent; the first reason counts; nothing once OnDone has run. A
  // callback already running may finish; after it only OnDone comes. The worker
  // sees its call reset within milliseconds.
  virtual void Cancel(CancelReason reason) = 0;
};

// What the replicas that take requests hold together: their last reports, and
// what they were sent since.
struct ModelLoad {
  uint64_t running = 0;
  uint64_t waiting = 0;
  uint64_t max_num_seqs = 0;
  // Of the cache, in whole pages.
  uint64_t used_tokens = 0;
  uint64_t total_tokens = 0;
};

// A model as clients see it.
struct ModelStatus {
  std::string name;
  // At least one replica of it takes requests now.
  bool ready = false;
  uint32_t num_replicas = 0;
  uint32_t num_ready_replicas = 0;
  ModelLoad load;
  // What its replicas agree on (api_version, weights_id, max_model_len,
  // vocab_size, eos_token_ids, tokenizer_hash, ...). Unset until one has been
  // reached.
  std::optional<kvasir::v1::WorkerInfo> info;
};

enum class RouterState { kStarting, kReady, kDraining };

struct RouterHealth {
  RouterState state = RouterState::kStarting;
  // Not draining and every model has a ready replica.
  bool ready = false;
  // Why not, for a person: "tiny: 0 of 2 replicas ready (127.0.0.1:9001: ...)".
  std::string detail;
};

// Threads: any thread.
class RequestRouter {
 public:
  virtual ~RequestRouter() = default;

  // Starts a request. An error is a refusal before anything started: the sink
  // is never called. NOT_FOUND (unknown model), INVALID_ARGUMENT (values,
  // limits named; NEVER_FITS where a prompt exceeds the model's length),
  // RESOURCE_EXHAUSTED (router queue full), UNAVAILABLE (no replica, draining),
  // DEADLINE_EXCEEDED (already past).
  virtual absl::StatusOr<std::shared_ptr<RequestHandle>> Submit(
      CanonicalRequest request, std::shared_ptr<RequestSink> sink) = 0;

  // A facade has refused a request by itself, before Submit: logs and counts
  // it as one that Submit refuses.
  virtual void LogRefused(CanonicalRequest request,
                          const absl::Status& why) = 0;

  virtual std::vector<ModelStatus> Models() const = 0;
  // NOT_FOUND with the known names.
  virtual absl::StatusOr<ModelStatus> Model(const std::string& name) const = 0;
  virtual RouterHealth Health() const = 0;
};

}  // namespace kvasir::router
