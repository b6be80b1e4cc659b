// Which requests the worker takes and why it refuses others: every refusal of a
// request by itself, by the engine's state or by a full queue is decided and
// worded here. Pure logic over numbers that the caller counts.
#pragma once

#include <cstdint>

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

  // By itself: ValidateRequest's errors; NEVER_FITS for a prompt of the model's
  // length or more.
  Refusal OfRequest(const Request& request) const;
  // By what else is there: `num_queued` requests wait, this one's id and
  // attempt live already or not, it starts in the next step or not.
  struct Place {
    uint32_t num_queued = 0;
    bool is_live = false;
    bool starts_at_once = false;
  };
  Refusal OfPlace(const Request& request, const Place& place) const;
  static Refusal OfState(Serving serving);
  // NEVER_FITS: samples run side by side, so many sequences a step has.
  static Refusal TooManySamples(uint32_t n, uint32_t max_num_seqs);

  // Of requests that wait or run.
  static Refusal DeadlinePassed(bool started);
  // Another replica may start in time what waited too long by the operator's
  // measure; a client's own patience is at an end everywhere.
  static Refusal QueueTimeout(const Request& request, absl::Duration waited);
  static Refusal NoTokenLeft();

 private:
  const RequestLimits limits_;
  const uint32_t max_queue_;
};

}  // namespace kvasir::worker
