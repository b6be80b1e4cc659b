// Where the router's metrics are bound.
#pragma once

#include <string>

#include "absl/time/time.h"
#include "router/core/access_log.h"
#include "router/replicas/replica.h"

namespace kvasir::router {

// Threads: any thread, several at once. Must not block.
class RouterObserver : public ReplicaObserver {
 public:
  // Submit said no.
  virtual void OnRefused(const absl::Status& /*why*/) {}
  // Submit to the stream's opening; of the first attempt.
  virtual void OnDispatched(absl::Duration /*waited*/) {}
  virtual void OnFirstToken(absl::Duration /*since_submit*/) {}
  // Between two deliveries of tokens of one sample.
  virtual void OnInterToken(absl::Duration /*gap*/, size_t /*tokens*/) {}
  // Tried elsewhere, before its first token.
  virtual void OnRetry(const absl::Status& /*why*/) {}
  virtual void OnRequestEnd(const AccessRecord& /*record*/) {}
  // Requests submitted and not ended; those of them that wait in the router.
  // In the order of the changes: called under the router's lock.
  virtual void OnInFlight(size_t /*in_flight*/, size_t /*queued*/) {}
};

}  // namespace kvasir::router
