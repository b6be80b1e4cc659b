// Events that the router's metrics count.
#pragma once

#include <string>

#include "absl/time/time.h"
#include "router/core/access_log.h"
#include "router/replicas/replica.h"

namespace kvasir::router {

// Threads: any thread, several at once. Must not block.
class RouterObserver : public ReplicaObserver {
 public:
  // Submit has refused a request.
  virtual void OnRefused(const absl::Status& /*why*/) {}
  // The first attempt's stream is opened; `waited` since Submit.
  virtual void OnDispatched(absl::Duration /*waited*/) {}
  virtual void OnFirstToken(absl::Duration /*since_submit*/) {}
  // The gap between two deliveries of tokens of one sample.
  virtual void OnInterToken(absl::Duration /*gap*/, size_t /*tokens*/) {}
  // An attempt has failed, and another replica is asked.
  virtual void OnRetry(const absl::Status& /*why*/) {}
  virtual void OnRequestEnd(const AccessRecord& /*record*/) {}
  // `in_flight`: requests submitted and not ended; `queued`: those of them that
  // wait in the router. Called under the router's lock, in the order of the
  // changes.
  virtual void OnInFlight(size_t /*in_flight*/, size_t /*queued*/) {}
};

}  // namespace kvasir::router
