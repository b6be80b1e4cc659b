// Chooses the replica for a request: pure functions over what is known of each.
//
// Two more policies fit the same signature: prefix affinity (PolicyRequest
// would carry the prompt's prefix hashes, ReplicaView each replica's known
// prefixes) and consistent hashing on a session.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace kvasir::router {

// One replica: its last report, and what this router has sent it since.
struct ReplicaView {
  // Ready, and not yet tried by this request.
  bool eligible = false;
  uint32_t running = 0;
  uint32_t waiting = 0;
  uint64_t free_pages = 0;
  uint64_t total_pages = 0;
  uint32_t page_tokens = 0;
  uint32_t max_num_seqs = 0;
  // Requests and prompt tokens that the last report cannot include.
  uint32_t unreported_requests = 0;
  uint64_t unreported_tokens = 0;
};

struct PolicyRequest {
  uint64_t prompt_tokens = 0;
};

enum class PolicyKind {
  // Each in turn.
  kRoundRobin,
  // The fewest requests that would wait; then the largest share of free pages
  // (in sixteenths, so that small differences do not send all requests to one
  // replica); then the fewest requests; then each in turn.
  kLeastLoaded,
};

// INVALID_ARGUMENT lists the known names: round_robin, least_loaded.
absl::StatusOr<PolicyKind> ParsePolicy(absl::string_view name);

// Returns an index into `replicas`, or nothing if none is eligible. `turn`
// counts the requests so far.
std::optional<size_t> PickReplica(PolicyKind kind,
                                  absl::Span<const ReplicaView> replicas,
                                  const PolicyRequest& request, uint64_t turn);

}  // namespace kvasir::router
