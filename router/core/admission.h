// Which requests the router takes, when they run, and why it refuses others:
// decided and worded here. Plain logic over tickets and requests, no clock and
// no threads of its own. Values are the worker's to judge; the router judges
// what it must know itself.
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
  // Requests that wait for one of those to end; more are refused.
  size_t max_queue = 1024;
};

using Ticket = uint64_t;

// Lower priority values first, then first come, first served.
// Threads: one at a time (the caller's mutex).
class Admission {
 public:
  explicit Admission(const AdmissionLimits& limits) : limits_(limits) {}

  enum class Answer { kRun, kWait };
  // `ticket` is new. A refused one is forgotten: RETRY_ELSEWHERE with the
  // numbers and the flags when the queue is full, DRAINING after BeginDrain.
  absl::StatusOr<Answer> Enter(Ticket ticket, int32_t priority);
  // Who is in stays.
  void BeginDrain() { draining_ = true; }
  bool draining() const { return draining_; }

  // A running ticket has ended. The tickets that run from now on.
  std::vector<Ticket> Leave();

  // A waiting ticket gives up; false if it was not waiting (any more).
  bool Withdraw(Ticket ticket);

  size_t in_flight() const { return in_flight_; }
  size_t waiting() const { return waiting_.size(); }

  // By itself, before it has a ticket, for a model that says `info`:
  // INVALID_ARGUMENT (no prompt, an n that no sink is sized for), NEVER_FITS,
  // DEADLINE_EXCEEDED.
  static absl::Status OfRequest(const CanonicalRequest& request,
                                const kvasir::v1::WorkerInfo& info,
                                uint32_t max_n, absl::Time now);

  // Until when a request waits, and how it ends then.
  struct Patience {
    absl::Time until;
    absl::Status then;
  };
  // `own`: what is left of the request's own queue timeout, where it has one;
  // `ours`: what the operator grants otherwise.
  static Patience OfWaiting(const CanonicalRequest& request,
                            std::optional<absl::Duration> own,
                            absl::Duration ours, absl::Time now);
  // The request's own queue timeout is over.
  static absl::Status TimedOut(const CanonicalRequest& request);
  // Nobody has told yet what the model takes.
  static absl::Status Unreached(const std::string& model,
                                absl::string_view problems);
  static absl::Status ShuttingDown();
  // No replica can be asked; each of them drains, or why none is ready.
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
