// The interface between facades and the router. A facade submits a request
// together with a sink, which receives the tokens. The facade gets a handle,
// which can cancel the request. The interface uses only token ids. Text, stop
// strings and chat templates belong to the facades.
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
  // The model's name as the client gave it. An empty name is refused
  // with NOT_FOUND.
  std::string model;
  // The id that the client gave the request, for the access log. It need
  // not be unique. Workers and traces use another id, which the router
  // makes (handle->id()).
  std::string client_request_id;
  std::string tenant;
  // Identifies the caller within its tenant in the access log: a token's label
  // or a certificate's name.
  std::string caller;
  // Requests share cached prefixes only if their salts are equal. Requests with
  // an empty salt share them with each other.
  std::string cache_salt;
  // The client's name for a conversation. Requests with equal salts and names
  // go to the same worker if possible. Empty if the client gave none.
  std::string session;
  TokenBytes prompt;
  // Start from NeutralSampling() and change what the client asked for. If
  // max_tokens is 0, the operator's default applies, limited by max_model_len.
  // Set the field `seed` below instead of sampling.seed, which the router
  // overwrites.
  kvasir::v1::SamplingParams sampling;
  // If absent, the router draws a random seed.
  std::optional<uint64_t> seed;
  absl::Time deadline = absl::InfiniteFuture();
  // How long the request may wait for its first step. If it waits longer, it
  // ends with DEADLINE_EXCEEDED. Zero: the operator's default applies, and a
  // request that waits longer is refused (RETRY_ELSEWHERE).
  absl::Duration queue_timeout = absl::ZeroDuration();
  // How many cache slots eviction keeps. If absent, the budget of the served
  // plan applies. The worker checks the value.
  std::optional<proto::EvictionBudget> eviction_budget;
  // Requests with lower values run first.
  int32_t priority = 0;
  // If true, the client gets the whole answer in one response at the end. So if
  // the worker is lost, another worker can continue from the tokens that the
  // router has received, or generate them again, even if it rounds differently.
  bool folded = false;
  // The W3C trace context that the client sent; empty if it sent none.
  std::string traceparent;
  // The request's share of the router's memory. The facade takes the share
  // when the request arrives, and the share grows with the received tokens.
  // May be null.
  std::shared_ptr<ByteShare> bytes;
  // The facade's name for the access log: "kserve", "vllm", ...
  std::string facade;
  std::string peer;
};

// Returns the largest number of samples of one request: the smaller of the
// workers' limit and `ours`, the router's own limit. The router has a limit
// because sinks allocate memory for each sample.
inline uint32_t LargestN(const kvasir::v1::WorkerInfo& info, uint32_t ours) {
  return info.max_n() == 0 ? ours : std::min(info.max_n(), ours);
}

// Receives one request's output. Facades implement it. It is held by
// shared_ptr, because either the router or the facade may drop it first. The
// router drops it after OnDone has returned.
//
// Threads: the router calls the sink of a request from one thread at a time. An
// implementation must not block or tokenize, because a few threads serve all
// requests. Calls may begin before Submit has returned. But Submit and Cancel
// themselves never call the sink, so it may hold its own lock around them. The
// sink may call Cancel.
//
// Backpressure: a client that reads slowly does not slow down its worker,
// because its request would hold cache pages for longer. Its tokens wait in the
// facade's queue. If this queue exceeds the facade's limit of bytes, the facade
// resets the client's stream and calls Cancel(kSlowReader).
class RequestSink {
 public:
  virtual ~RequestSink() = default;

  // A worker has put the request into its queue. Called at most once.
  virtual void OnAccepted(uint32_t prompt_tokens) = 0;
  // New tokens of the sample tokens.index(). They come in order and are
  // never repeated.
  virtual void OnTokens(const kvasir::v1::GenerateEvent::Tokens& tokens) = 0;
  // A sample has ended. Before OnDone is called with OK, OnFinish is called
  // once for each sample.
  virtual void OnFinish(const kvasir::v1::GenerateEvent::Finish& finish) = 0;
  // The request has ended. An error says why: CANCELLED after Cancel,
  // DEADLINE_EXCEEDED, UNAVAILABLE if the worker was lost, INTERNAL if the
  // worker broke its protocol, or a refusal (proto::RefusalOf), which is
  // DRAINING after Cancel(kShutdown).
  virtual void OnDone(const absl::Status& status) = 0;
};

enum class CancelReason {
  // The client has disconnected, has reset its call, or has asked to stop
  // the request.
  kClient,
  // The facade needs no more tokens, because a stop string matched. The request
  // is logged and counted as finished with reason "stop", and not as cancelled.
  kStopString,
  // The request's output exceeds the facade's limit of waiting bytes, because
  // the client reads too slowly.
  kSlowReader,
  kShutdown,
};

// A submitted request. Dropping the handle does not cancel the request.
// Threads: its methods may be called from any thread.
class RequestHandle {
 public:
  virtual ~RequestHandle() = default;

  // The unique id of the request in logs, in traces and at workers.
  virtual const std::string& id() const = 0;
  // Cancels the request. If it is called more than once, the first reason
  // counts. After OnDone, Cancel has no effect. A running call of the sink may
  // finish. After that, the sink gets only OnDone. The call to the worker is
  // reset within milliseconds.
  virtual void Cancel(CancelReason reason) = 0;
};

// The total load of all replicas that accept requests. It is the sum of their
// last reports and of the requests that the router has sent since then.
struct ModelLoad {
  uint64_t running = 0;
  uint64_t waiting = 0;
  uint64_t max_num_seqs = 0;
  // How many tokens the used cache pages can hold, and how many all cache pages
  // can hold.
  uint64_t used_tokens = 0;
  uint64_t total_tokens = 0;
};

// The state of a served model.
struct ModelStatus {
  std::string name;
  // True if at least one replica accepts requests now.
  bool ready = false;
  uint32_t num_replicas = 0;
  uint32_t num_ready_replicas = 0;
  ModelLoad load;
  // Properties that the model's replicas have in common (api_version,
  // weights_id, max_model_len, vocab_size, eos_token_ids, tokenizer_hash, ...).
  // Unset until a replica has been reached.
  std::optional<kvasir::v1::WorkerInfo> info;
};

enum class RouterState { kStarting, kReady, kDraining };

struct RouterHealth {
  RouterState state = RouterState::kStarting;
  // True if the router is not draining and every model has a ready replica.
  bool ready = false;
  // If the router is not ready, a text for people that says why, for example
  // "tiny: 0 of 2 replicas ready (127.0.0.1:9001: ...)".
  std::string detail;
};

// Accepts requests from facades and sends them to workers.
// Threads: its methods may be called from any thread.
class RequestRouter {
 public:
  virtual ~RequestRouter() = default;

  // Starts a request. If it returns an error, the request was refused and the
  // sink is never called. If no replica is ready, the request waits for one
  // until its queue timeout.
  // Errors:
  // NOT_FOUND: the model is unknown.
  // INVALID_ARGUMENT: a value exceeds a limit, which the text names, or the
  //   prompt exceeds the model's length (the refusal NEVER_FITS).
  // RESOURCE_EXHAUSTED: the router's queue is full.
  // UNAVAILABLE: the router or every replica is draining, or no replica is
  //   ready and too many requests wait.
  // DEADLINE_EXCEEDED: the deadline has already passed.
  virtual absl::StatusOr<std::shared_ptr<RequestHandle>> Submit(
      CanonicalRequest request, std::shared_ptr<RequestSink> sink) = 0;

  // Logs and counts a request that a facade has refused. Requests that Submit
  // refuses are logged and counted in the same way.
  virtual void LogRefused(CanonicalRequest request,
                          const absl::Status& why) = 0;

  virtual std::vector<ModelStatus> Models() const = 0;
  // Returns NOT_FOUND for an unknown name; the text lists the known names.
  virtual absl::StatusOr<ModelStatus> Model(const std::string& name) const = 0;
  virtual RouterHealth Health() const = 0;
};

}  // namespace kvasir::router
