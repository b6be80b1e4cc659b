// Decides which requests the router accepts and when they run, and builds the
// statuses of refused requests. It has no clock and no threads. Workers check
// most values of a request. The router checks only those on which its own
// work depends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "router/base/canonical.h"

namespace kvasir::router {

struct AdmissionLimits {
  // How many requests may run at the same time, on all replicas together.
  size_t max_in_flight = 4096;
  // How many requests may wait until a running one ends. Further requests
  // are refused.
  size_t max_queue = 1024;
};

using Ticket = uint64_t;

// A queue of requests, each identified by a ticket. Requests with lower
// priority values run first; those with equal values in the order of
// their arrival.
// Threads: only one thread at a time may use it. Its owner has a mutex
// for this.
class Admission {
 public:
  explicit Admission(const AdmissionLimits& limits) : limits_(limits) {}

  enum class Answer { kRun, kWait };
  // Enters a new ticket. It may run, must wait, or is refused:
  // RETRY_ELSEWHERE if the queue is full (the text names the limits),
  // DRAINING after BeginDrain.
  absl::StatusOr<Answer> Enter(Ticket ticket, int32_t priority);
  // Enters a ticket again that had left in order to wait for a replica. Such a
  // ticket is never refused.
  Answer Return(Ticket ticket, int32_t priority);
  // Enters a ticket again whose request has output. It runs at once, even if
  // this exceeds the limit for a while, because its client is reading.
  void Resume() { ++in_flight_; }
  // From now on Enter refuses. Requests that run or wait are not affected.
  void BeginDrain() { draining_ = true; }
  bool draining() const { return draining_; }

  // Call this when the request of a running ticket has ended. Returns the
  // tickets that no longer wait but run from now on.
  std::vector<Ticket> Leave();

  // Removes a waiting ticket. Returns false if the ticket is not waiting.
  bool Withdraw(Ticket ticket);

  size_t in_flight() const { return in_flight_; }
  size_t waiting() const { return waiting_.size(); }

  // Checks a request for the model that `info` describes, before the
  // request gets a ticket. Errors: INVALID_ARGUMENT (no prompt, or n is 0
  // or exceeds max_n or the workers' limit), NEVER_FITS (the prompt is too
  // long), DEADLINE_EXCEEDED.
  static absl::Status CheckRequest(const CanonicalRequest& request,
                                   const kvasir::v1::WorkerInfo& info,
                                   uint32_t max_n, absl::Time now);

  // A request's state on which its patience depends.
  struct Waiting {
    absl::Time arrival;  // when the request arrived at the router
    absl::Time since;    // when it arrived, or last lost its worker
    // True if it has output. Its own queue timeout then no longer applies.
    bool begun = false;
  };
  // How long a request waits: at the time `until` it ends with the
  // status `then`.
  struct Patience {
    absl::Time until;
    absl::Status then;
  };
  // Returns the earlier of the request's deadline and its queue timeout. If the
  // request has no queue timeout, `ours` (the operator's) applies from
  // `waiting.since` on, and the request then ends with `then`.
  static Patience PatienceOf(const CanonicalRequest& request,
                             const Waiting& waiting, absl::Duration ours,
                             const absl::Status& then);
  // The status of a request that has waited for the operator's queue timeout.
  static absl::Status WaitedTooLong(absl::Duration queue_timeout);
  // The status of a request whose own queue timeout has passed.
  static absl::Status TimedOut(const CanonicalRequest& request);
  // The status of a request for `model` if no worker of the model has been
  // reached yet.
  static absl::Status Unreached(const std::string& model);
  static absl::Status ShuttingDown();
  // The status of a request that no replica can run. If `all_drain`, every
  // replica is draining; otherwise no replica is ready.
  static absl::Status NoReplica(const std::string& model, bool all_drain);

 private:
  using Place = std::pair<int32_t, uint64_t>;  // (priority, ticket)

  void Wait(Ticket ticket, int32_t priority);

  const AdmissionLimits limits_;
  bool draining_ = false;
  size_t in_flight_ = 0;
  std::map<Place, Ticket> waiting_;
  std::unordered_map<Ticket, Place> places_;
};

}  // namespace kvasir::router
