// Chooses the replica for a request. The functions' results depend only on
// their arguments.
#pragma once

#include <compare>
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
  // A hash of the replica's name, which is the same at every router.
  uint64_t name = 0;
  // Identifies the worker's process: another number after each connection,
  // because the worker may have restarted with an empty cache. 0: not known.
  uint64_t incarnation = 0;
};

struct PolicyRequest {
  uint64_t prompt_tokens = 0;
  // The keys of the prompt's full pages; empty if there are none.
  absl::Span<const uint64_t> pages;
  // A hash of the session that the client has named; 0 if it has named none.
  uint64_t session = 0;
};

enum class PolicyKind {
  // The replicas take turns.
  kRoundRobin,
  // Chooses the replica at which the fewest requests would wait. If several are
  // equal in this, the largest share of free pages decides, and then the fewest
  // requests. Equal replicas take turns. The share is rounded to sixteenths, so
  // that small differences do not send all requests to one replica.
  kLeastLoaded,
  // Chooses the replica that has the longest prefix of the prompt, unless its
  // load is far above the mean (picker.h). PickReplica treats it as
  // kLeastLoaded.
  kPrefixAffinity,
};

// Returns a hash of the text that is the same on every machine.
uint64_t StableHash(absl::string_view text);

// Parses the names of --policy. For another name, returns INVALID_ARGUMENT
// with the list of known names.
absl::StatusOr<PolicyKind> ParsePolicy(absl::string_view name);

// Returns an index into `replicas`; nullopt if none is eligible. `turn` is
// the number of requests so far. With each turn, another one of equal
// replicas is chosen.
std::optional<size_t> PickReplica(PolicyKind kind,
                                  absl::Span<const ReplicaView> replicas,
                                  const PolicyRequest& request, uint64_t turn);

// The order of kLeastLoaded: the smaller, the better. The fields are compared
// in this order.
struct Load {
  // How many requests would wait at the replica if it got this request too; 0
  // if the request could start at once.
  uint64_t would_wait = 0;
  uint64_t used_sixteenths = 0;  // of the pages
  uint64_t requests = 0;         // those that run and those not reported yet

  friend auto operator<=>(const Load&, const Load&) = default;
};
// The number of requests that run or wait at the replica.
uint64_t RequestsAt(const ReplicaView& replica);
// True if the replica has a place in its batch, and pages, for the request.
bool HasRoom(const ReplicaView& replica, const PolicyRequest& request);
Load LoadOf(const ReplicaView& replica, const PolicyRequest& request);

}  // namespace kvasir::router
