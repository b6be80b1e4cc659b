// How many requests run and how many wait: plain logic over tickets, no clock
// and no threads of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"

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

  enum class Answer { kRun, kWait, kRefuse };
  // `ticket` is new. A refused one is forgotten.
  Answer Enter(Ticket ticket, int32_t priority);

  // A running ticket has ended. The tickets that run from now on.
  std::vector<Ticket> Leave();

  // A waiting ticket gives up; false if it was not waiting (any more).
  bool Withdraw(Ticket ticket);

  size_t in_flight() const { return in_flight_; }
  size_t waiting() const { return waiting_.size(); }
  // RETRY_ELSEWHERE with the numbers and the flags.
  absl::Status RefusedStatus() const;

 private:
  using Place = std::pair<int32_t, uint64_t>;  // priority, arrival

  const AdmissionLimits limits_;
  size_t in_flight_ = 0;
  uint64_t arrivals_ = 0;
  std::map<Place, Ticket> waiting_;
  std::unordered_map<Ticket, Place> places_;
};

}  // namespace kvasir::router
