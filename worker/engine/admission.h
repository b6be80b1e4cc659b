// Which requests the worker takes and why it refuses others: every refusal of a
// request by itself, by the engine's state or by a full queue is decided and
// worded here. Pure logic over numbers that the caller counts.
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
  // max_queue: requests that wait for their first step; more are refused.
  Admission(const RequestLimits& limits, uint32_t max_queue)
      : limits_(limits), max_queue_(max_queue) {}

  // By itself: NEVER_FITS for a prompt of the model's length or more, else
  // ValidateRequest's errors.
  Refusal OfRequest(const Request& request) const;
  // FAILED_PRECONDITION for one that wants (empty: any) other weights than this
  // worker's.
  static Refusal OfWeights(std::string_view want, std::string_view have);
  // By what else is there: `num_queued` requests wait, this one's id and
  // attempt live already or not, it starts in the next step or not.
  struct Place {
    uint32_t num_queued = 0;
    bool is_live = false;
    bool starts_at_once = false;
  };
  Refusal OfPlace(const Request& request, const Place& place) const;
  static Refusal OfState(Serving serving);

  // Of requests that wait or run.
  static Refusal DeadlinePassed(bool started);
  // Another replica may start in time what waited too long by the operator's
  // measure; a client's own patience is at an end everywhere.
  static Refusal QueueTimeout(const Request& request, absl::Duration waited);
  static Refusal NoTokenLeft();
  // Of all that live, when the worker goes; another one may run them again.
  static Refusal DrainEnded();
  static Refusal EngineStopped();
  static Refusal ExecutorFailed(const absl::Status& why);

 private:
  const RequestLimits limits_;
  const uint32_t max_queue_;
};

}  // namespace kvasir::worker
