#include "router/policy/policy.h"

#include <algorithm>
#include <tuple>

#include "absl/strings/str_cat.h"

namespace kvasir::router {
namespace {

constexpr uint64_t kFreeShareSteps = 16;

uint64_t PagesOf(uint64_t tokens, const ReplicaView& replica) {
  if (replica.page_tokens == 0) return 0;
  return (tokens + replica.page_tokens - 1) / replica.page_tokens;
}

uint64_t FreePages(const ReplicaView& replica) {
  const uint64_t taken = PagesOf(replica.unreported_tokens, replica);
  return replica.free_pages > taken ? replica.free_pages - taken : 0;
}

// Returns how many requests would wait at the replica if it got this request
// too; 0 if the request could start at once.
uint64_t WouldWait(const ReplicaView& replica, const PolicyRequest& request) {
  const uint64_t seats = replica.max_num_seqs;
  const uint64_t wanted = uint64_t{replica.running} + replica.waiting +
                          replica.unreported_requests + 1;
  const uint64_t beyond = wanted > seats ? wanted - seats : 0;
  const bool no_room =
      FreePages(replica) < PagesOf(request.prompt_tokens, replica);
  return std::max<uint64_t>({replica.waiting, beyond, no_room ? 1u : 0u});
}

uint64_t UsedShare(const ReplicaView& replica) {
  if (replica.total_pages == 0) return kFreeShareSteps;
  return kFreeShareSteps -
         FreePages(replica) * kFreeShareSteps / replica.total_pages;
}

auto LoadOf(const ReplicaView& replica, const PolicyRequest& request) {
  return std::make_tuple(
      WouldWait(replica, request), UsedShare(replica),
      uint64_t{replica.running} + replica.unreported_requests);
}

}  // namespace

absl::StatusOr<PolicyKind> ParsePolicy(absl::string_view name) {
  if (name == "round_robin") return PolicyKind::kRoundRobin;
  if (name == "least_loaded") return PolicyKind::kLeastLoaded;
  return absl::InvalidArgumentError(
      absl::StrCat("policy '", name,
                   "' is unknown: it must be round_robin or least_loaded"));
}

std::optional<size_t> PickReplica(PolicyKind kind,
                                  absl::Span<const ReplicaView> replicas,
                                  const PolicyRequest& request, uint64_t turn) {
  std::optional<size_t> best;
  for (size_t i = 0; i < replicas.size(); ++i) {
    const size_t index = (turn + i) % replicas.size();
    if (!replicas[index].eligible) continue;
    if (!best.has_value() ||
        (kind == PolicyKind::kLeastLoaded &&
         LoadOf(replicas[index], request) < LoadOf(replicas[*best], request))) {
      best = index;
    }
  }
  return best;
}

}  // namespace kvasir::router
