// Decides which requests the worker takes, and words every refusal. Reasons are
// the request itself, the engine's state, or a full queue. Pure logic over
// numbers that the caller counts.
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

// Threads: const methods from any thread.
class Admission {
 public:
  // max_queue: how many requests may wait for their first step.
  Admission(const RequestLimits& limits, uint32_t max_queue)
      : limits_(limits), max_queue_(max_queue) {}

  // NEVER_FITS for a prompt of the model's length or more. Otherwise the errors
  // of ValidateRequest.
  Refusal CheckRequest(const Request& request) const;
  // UNAVAILABLE, RETRY_ELSEWHERE, if the request wants other weights than this
  // worker has. An empty `want` accepts any weights.
  static Refusal CheckWeights(std::string_view want, std::string_view have);
  struct Place {
    uint32_t num_queued = 0;  // requests that wait for their first step
    bool is_live = false;     // the request's id and attempt are in use
    // The request joins the next step, so that it takes no place in the queue.
    bool starts_at_once = false;
  };
  // ALREADY_EXISTS if the request is live, RESOURCE_EXHAUSTED if the queue is
  // full.
  Refusal CheckPlace(const Request& request, const Place& place) const;
  // UNAVAILABLE unless the engine is running.
  static Refusal CheckState(Serving serving);

  // Ends of requests that wait or run.
  static Refusal DeadlinePassed(bool started);
  // If the operator's limit was exceeded, another replica may start the request
  // in time (RETRY_ELSEWHERE). The client's own limit holds everywhere.
  static Refusal QueueTimeout(const Request& request, absl::Duration waited);
  static Refusal NoTokenLeft();
  // Ends of all live requests, which another worker may run again.
  static Refusal DrainEnded();
  static Refusal EngineStopped();
  static Refusal ExecutorFailed(const absl::Status& why);

 private:
  const RequestLimits limits_;
  const uint32_t max_queue_;
};

}  // namespace kvasir::worker
