// Decides which requests the worker accepts, and writes the text of every
// refusal. A request is refused because of its own values, the engine's state,
// or a full queue. This class keeps no counts: the caller passes them in.
#pragma once

#include <cstdint>
#include <string_view>

#include "absl/time/time.h"
#include "worker/engine/request.h"

namespace kvasir::worker {

enum class Serving {
  kStarting,
  kRunning,
  kDraining,
  kStopped,
  kFailed,
};

// Threads: const methods may be called from any thread.
class Admission {
 public:
  // `max_queue` is the most requests that may wait for their first step.
  Admission(const RequestLimits& limits, uint32_t max_queue)
      : limits_(limits), max_queue_(max_queue) {}

  // Refuses with NEVER_FITS if the prompt leaves no room for output within the
  // model's length. Otherwise returns the errors of ValidateRequest.
  Refusal CheckRequest(const Request& request) const;
  // Refuses with UNAVAILABLE and the reason RETRY_ELSEWHERE if the request asks
  // for other weights (`want`) than this worker has loaded (`have`). An empty
  // `want` accepts any weights.
  static Refusal CheckWeights(std::string_view want, std::string_view have);
  struct Place {
    uint32_t num_queued = 0;  // requests waiting for their first step
    bool is_live = false;     // a live request has the same id and attempt
    // true: the request can join the next step, so a full queue does not matter
    bool starts_at_once = false;
  };
  // Refuses with ALREADY_EXISTS if the request is live, or with
  // RESOURCE_EXHAUSTED if the queue is full.
  Refusal CheckPlace(const Request& request, const Place& place) const;
  // Refuses with UNAVAILABLE unless the engine is running.
  static Refusal CheckState(Serving serving);

  // DeadlinePassed, QueueTimeout and NoTokenLeft return the error with which an
  // accepted request ends early.
  static Refusal DeadlinePassed(bool started);
  // If the operator's queue timeout has passed, Refusal::reason is
  // RETRY_ELSEWHERE. If the request's own queue timeout has passed, the reason
  // is unspecified, because a retry would be too late.
  static Refusal QueueTimeout(const Request& request, absl::Duration waited);
  static Refusal NoTokenLeft();
  // DrainEnded, EngineStopped and ExecutorFailed return the error with which
  // all live requests end. Its reason allows another worker to run them.
  static Refusal DrainEnded();
  static Refusal EngineStopped();
  static Refusal ExecutorFailed(const absl::Status& why);

 private:
  const RequestLimits limits_;
  const uint32_t max_queue_;
};

}  // namespace kvasir::worker
