// The interface through which the router reports events to its metrics.
#pragma once

#include <string>

#include "absl/time/time.h"
#include "router/core/access_log.h"
#include "router/core/request_flow.h"
#include "router/replicas/replica.h"

namespace kvasir::router {

// Receives the router's events.
// Threads: several threads may call methods at once. A call must not block.
class RouterObserver : public ReplicaObserver {
 public:
  // Submit has refused a request.
  virtual void OnRefused(const absl::Status& /*why*/) {}
  // The first attempt of a request has started, `waited` after Submit.
  virtual void OnDispatched(absl::Duration /*waited*/) {}
  virtual void OnFirstToken(absl::Duration /*since_submit*/) {}
  // `tokens` tokens of a sample have arrived, `gap` after the sample's
  // previous tokens.
  virtual void OnInterToken(absl::Duration /*gap*/, size_t /*tokens*/) {}
  // An attempt of a request has failed, and another replica is asked.
  virtual void OnRetry(const absl::Status& /*why*/) {}
  // A request with output goes on at another replica, or at the same one after
  // it has come back. The replica must prefill `tokens` tokens.
  virtual void OnMove(MoveReason /*reason*/, uint64_t /*tokens*/) {}
  // The router keeps so many bytes more (below 0: fewer) of requests' output
  // tokens, with which they can move.
  virtual void OnKeptBytes(int64_t /*bytes*/) {}
  // How many of the replicas in use have streams that may move in this way.
  // Only one thread calls this.
  virtual void OnReplicasByMoves(MoveStreams /*moves*/, size_t /*replicas*/) {}
  virtual void OnRequestEnd(const AccessRecord& /*record*/) {}
  // The number of requests in flight or in the queue has changed. `in_flight`
  // requests have been submitted and have not ended. `queued` of them wait in
  // the router. The router calls this under its lock, so that the calls come in
  // the order of the changes.
  virtual void OnInFlight(size_t /*in_flight*/, size_t /*queued*/) {}
};

}  // namespace kvasir::router
