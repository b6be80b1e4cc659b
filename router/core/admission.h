// Decides which requests the router accepts and when they run, and words its
// refusals. Plain logic over tickets and requests, without a clock or threads.
// The worker checks a request's values; the router checks only what it must
// know itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "router/base/canonical.h"

namespace kvasir::router {

struct AdmissionLimits {
  // Requests sent to workers at one time, over all replicas.
  size_t max_in_flight = 4096;
  // Requests that wait for one of those to end; further ones are refused.
  size_t max_queue = 1024;
};

using Ticket = uint64_t;

// Lower priority values run first, then first come, first served.
// Threads: one at a time (the caller's mutex).
class Admission {
 public:
  explicit Admission(const AdmissionLimits& limits) : limits_(limits) {}

  enum class Answer { kRun, kWait };
  // `ticket` must be new. A refused ticket is forgotten: RETRY_ELSEWHERE with
  // the numbers and the flags if the queue is full, DRAINING after BeginDrain.
  absl::StatusOr<Answer> Enter(Ticket ticket, int32_t priority);
  // Requests that were admitted stay.
  void BeginDrain() { draining_ = true; }
  bool draining() const { return draining_; }

  // Ends a running ticket. Returns the waiting tickets that run from now on.
  std::vector<Ticket> Leave();

  // Removes a waiting ticket; false if it was not waiting (any more).
  bool Withdraw(Ticket ticket);

  size_t in_flight() const { return in_flight_; }
  size_t waiting() const { return waiting_.size(); }

  // Checks a request before it has a ticket, with its model's `info`:
  // INVALID_ARGUMENT (no prompt, or an n that exceeds the sinks' limit),
  // NEVER_FITS, DEADLINE_EXCEEDED.
  static absl::Status OfRequest(const CanonicalRequest& request,
                                const kvasir::v1::WorkerInfo& info,
                                uint32_t max_n, absl::Time now);

  // Until when a request waits, and the status that ends it then.
  struct Patience {
    absl::Time until;
    absl::Status then;
  };
  // `own`: what is left of the request's own queue timeout, if it has one;
  // `ours`: the operator's queue timeout, for requests without one.
  static Patience OfWaiting(const CanonicalRequest& request,
                            std::optional<absl::Duration> own,
                            absl::Duration ours, absl::Time now);
  // The request's own queue timeout is over.
  static absl::Status TimedOut(const CanonicalRequest& request);
  // No worker has reported yet what the model accepts.
  static absl::Status Unreached(const std::string& model,
                                absl::string_view problems);
  static absl::Status ShuttingDown();
  // No replica can be asked: all of them drain, or `problems` says why none is
  // ready.
  static absl::Status NoReplica(const std::string& model, bool all_drain,
                                absl::string_view problems);

 private:
  using Place = std::pair<int32_t, uint64_t>;  // priority, arrival

  const AdmissionLimits limits_;
  bool draining_ = false;
  size_t in_flight_ = 0;
  uint64_t arrivals_ = 0;
  std::map<Place, Ticket> waiting_;
  std::unordered_map<Ticket, Place> places_;
};

}  // namespace kvasir::router
