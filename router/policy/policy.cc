#include "router/policy/policy.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace kvasir::router {
namespace {

constexpr uint64_t kFreeShareSteps = 16;

uint64_t PagesOf(uint64_t tokens, const ReplicaView& replica) {
  if (tokens == 0 || replica.page_tokens == 0) return 0;
  return (tokens + replica.page_tokens - 1) / replica.page_tokens;
}

uint64_t FreePages(const ReplicaView& replica) {
  const uint64_t taken = PagesOf(replica.unreported_tokens, replica);
  return replica.free_pages > taken ? replica.free_pages - taken : 0;
}

// How many requests would have no place in the batch.
uint64_t BeyondSeats(const ReplicaView& replica) {
  const uint64_t seats = replica.max_num_seqs;
  const uint64_t wanted = RequestsAt(replica) + 1;
  return wanted > seats ? wanted - seats : 0;
}

bool HasPages(const ReplicaView& replica, const PolicyRequest& request) {
  return FreePages(replica) >= PagesOf(request.prompt_tokens, replica);
}

uint64_t WouldWait(const ReplicaView& replica, const PolicyRequest& request) {
  return std::max<uint64_t>({replica.waiting, BeyondSeats(replica),
                             HasPages(replica, request) ? 0u : 1u});
}

uint64_t UsedShare(const ReplicaView& replica) {
  if (replica.total_pages == 0) return kFreeShareSteps;
  return kFreeShareSteps -
         FreePages(replica) * kFreeShareSteps / replica.total_pages;
}

}  // namespace

uint64_t RequestsAt(const ReplicaView& replica) {
  return uint64_t{replica.running} + replica.waiting +
         replica.unreported_requests;
}

bool HasRoom(const ReplicaView& replica, const PolicyRequest& request) {
  return BeyondSeats(replica) == 0 && HasPages(replica, request);
}

Load LoadOf(const ReplicaView& replica, const PolicyRequest& request) {
  return {WouldWait(replica, request), UsedShare(replica),
          uint64_t{replica.running} + replica.unreported_requests};
}

uint64_t StableHash(absl::string_view text) {
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  for (const char c : text) {
    hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  }
  return hash;
}

absl::StatusOr<PolicyKind> ParsePolicy(absl::string_view name) {
  if (name == "round_robin") return PolicyKind::kRoundRobin;
  if (name == "least_loaded") return PolicyKind::kLeastLoaded;
  if (name == "prefix_affinity") return PolicyKind::kPrefixAffinity;
  return absl::InvalidArgumentError(absl::StrCat(
      "policy '", name,
      "' is unknown: it must be round_robin, least_loaded or prefix_affinity"));
}

std::optional<size_t> PickReplica(PolicyKind kind,
                                  absl::Span<const ReplicaView> replicas,
                                  const PolicyRequest& request, uint64_t turn) {
  std::optional<size_t> best;
  for (size_t i = 0; i < replicas.size(); ++i) {
    const size_t index = (turn + i) % replicas.size();
    if (!replicas[index].eligible) continue;
    if (!best.has_value() ||
        (kind != PolicyKind::kRoundRobin &&
         LoadOf(replicas[index], request) < LoadOf(replicas[*best], request))) {
      best = index;
    }
  }
  return best;
}

}  // namespace kvasir::router
