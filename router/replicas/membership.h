// The workers of a source whose answers may be incomplete or outdated.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "router/replicas/worker_client.h"

namespace kvasir::router {

struct MembershipRules {
  // An address is removed after this many answers in a row without it.
  int answers_to_remove = 1;
  // If true, an answer without any address counts only for workers that are not
  // alive, because a name server may have lost its data.
  bool empty_keeps_live = false;
};

// Its results depend only on the answers so far. A failed lookup is no answer
// and changes nothing.
// Threads: only one thread at a time may use it.
class Membership {
 public:
  explicit Membership(MembershipRules rules) : rules_(rules) {}

  // Takes the addresses of a lookup, in any order; one that occurs twice counts
  // once. `alive` returns whether the router is connected to a worker.
  void OnAnswer(const std::vector<WorkerAddress>& answer,
                const std::function<bool(const std::string& target)>& alive);

  // The addresses, in the order in which they were found first.
  std::vector<WorkerAddress> workers() const;

 private:
  struct Known {
    WorkerAddress address;
    // How many answers in a row did not have the address.
    int missing = 0;
  };

  const MembershipRules rules_;
  std::vector<Known> known_;
};

}  // namespace kvasir::router
