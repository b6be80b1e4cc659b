// Chooses the replica for a request. The functions are pure: the result depends
// only on what the router knows about each replica.
// Two more policies could use the same function signature. One is prefix
// affinity: PolicyRequest would have the hashes of the prompt's prefixes, and
// ReplicaView the hashes of the prefixes that the replica has cached. The other
// is consistent hashing by session.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace kvasir::router {

// The load of a replica, as far as the router knows it: from its last report,
// and from the requests that this router has sent it since.
struct ReplicaView {
  // True if the replica is ready and has not yet been asked to run this
  // request.
  bool eligible = false;
  uint32_t running = 0;
  uint32_t waiting = 0;
  uint64_t free_pages = 0;
  uint64_t total_pages = 0;
  uint32_t page_tokens = 0;
  uint32_t max_num_seqs = 0;
  // How many requests the replica's last report cannot include yet, and how
  // many tokens their prompts have.
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
  // equal, it chooses the one with the largest share of free pages (rounded to
  // sixteenths, so that small differences do not send all requests to one
  // replica), and after that the one with the fewest requests. If replicas are
  // still equal, they take turns.
  kLeastLoaded,
};

// Parses "round_robin" or "least_loaded". For another name, returns
// INVALID_ARGUMENT with the list of known names.
absl::StatusOr<PolicyKind> ParsePolicy(absl::string_view name);

// Returns an index into `replicas`; nullopt if none is eligible. Equal replicas
// take turns by `turn`, the number of requests so far.
std::optional<size_t> PickReplica(PolicyKind kind,
                                  absl::Span<const ReplicaView> replicas,
                                  const PolicyRequest& request, uint64_t turn);

}  // namespace kvasir::router
