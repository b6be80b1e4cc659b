// Chooses the replica for a request. The functions' results depend only on
// their arguments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace kvasir::router {

// The load of a replica, as far as the router knows it: the replica's last
// report, and the requests that this router has sent since then.
struct ReplicaView {
  // True if the replica is ready and this request has not been sent to it yet.
  bool eligible = false;
  uint32_t running = 0;
  uint32_t waiting = 0;
  uint64_t free_pages = 0;
  uint64_t total_pages = 0;
  uint32_t page_tokens = 0;
  uint32_t max_num_seqs = 0;
  // Requests that were sent after the replica's last report, and the tokens of
  // their prompts.
  uint32_t unreported_requests = 0;
  uint64_t unreported_tokens = 0;
};

struct PolicyRequest {
  uint64_t prompt_tokens = 0;
};

enum class PolicyKind {
  // The replicas take turns.
  kRoundRobin,
  // Chooses the replica at which the fewest requests would wait. If several are
  // equal in this, the largest share of free pages decides, and then the fewest
  // requests. Equal replicas take turns. The share is rounded to sixteenths, so
  // that small differences do not send all requests to one replica.
  kLeastLoaded,
};

// Parses "round_robin" or "least_loaded". For another name, returns
// INVALID_ARGUMENT with the list of known names.
absl::StatusOr<PolicyKind> ParsePolicy(absl::string_view name);

// Returns an index into `replicas`; nullopt if none is eligible. `turn` is
// the number of requests so far. With each turn, another one of equal
// replicas is chosen.
std::optional<size_t> PickReplica(PolicyKind kind,
                                  absl::Span<const ReplicaView> replicas,
                                  const PolicyRequest& request, uint64_t turn);

}  // namespace kvasir::router
