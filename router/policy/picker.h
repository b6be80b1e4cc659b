// Chooses replicas for requests by one of the policies, and keeps what the
// policies remember.
//
// kPrefixAffinity saves prompt tokens: a request goes to a replica that was
// sent the longest part of its prompt, as long as that replica's load is within
// a bound. The bounds are those of "Consistent Hashing with Bounded Loads"
// (Mirrokni, Thorup and Zadimoghaddam, 2018): with n replicas and m requests in
// flight, a replica gets at most load_factor * (m + 1) / n of them, rounded up,
// in proportion to max_num_seqs. A replica with fewer than 4 requests that all
// run may always get one. A replica that has no place in its batch or no pages
// for it is left out if another has both.
//
// Among the replicas within the bound:
// 1. With a session, rendezvous hashing of the session and the replicas' names
//    decides. So routers that share no state agree, and a replica that is added
//    or lost moves only its own share of the sessions.
// 2. Otherwise the longest hit decides, and among equal hits the load; equal
//    replicas take turns. A prefix that several replicas have is given to one
//    more if that one's load is at most the mean / load_factor: so a new
//    replica gets its share of the requests with a common system prompt.
// 3. Without a hit the load decides. Equal replicas are ordered by the
//    rendezvous hash of the first page.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/mutex.h"
#include "cache/prefix/prefix_hash.h"
#include "proto/token_bytes.h"
#include "router/policy/policy.h"
#include "router/policy/prefix_map.h"

namespace kvasir::router {

// The most pages of a prompt that are hashed and remembered. Prompts that
// differ only after them count as equal.
inline constexpr size_t kMaxKeyedPages = 1024;

struct PickerOptions {
  PolicyKind policy = PolicyKind::kPrefixAffinity;
  // At least 1.
  double load_factor = 1.25;
  // The size of the memory of prefixes.
  size_t prefix_bytes = size_t{16} << 20;
  // Should be a secret random number (PrefixMap).
  uint64_t seed = 0;
};

// Owns: the memory of prefixes.
// Threads: its methods may be called from any thread.
class ReplicaPicker {
 public:
  explicit ReplicaPicker(const PickerOptions& options);

  // Returns the keys of the prompt's full pages, but at most kMaxKeyedPages:
  // the first 64 bits of the names that the workers' caches give them
  // (cache/prefix/prefix_hash.h). So tenants with different salts never have
  // equal keys. Returns nothing if the policy does not use them.
  std::vector<uint64_t> KeysOf(const proto::TokenBytes& prompt,
                               absl::string_view salt,
                               const std::string& cache_id,
                               uint32_t page_tokens)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Returns an index into `replicas`, and remembers that this replica is sent
  // the prompt. nullopt if none is eligible.
  std::optional<size_t> Pick(absl::Span<const ReplicaView> replicas,
                             const PolicyRequest& request)
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Slot {
    uint64_t incarnation = 0;  // 0: the slot is free
    uint64_t last_seen = 0;    // the turn
  };

  std::optional<size_t> PickByPrefix(absl::Span<const ReplicaView> replicas,
                                     const PolicyRequest& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns the slot of an incarnation of a replica, and gives it one if
  // necessary. Returns kNoSlot if the number is 0 or all slots are in use.
  // `index` is the replica's place in the list.
  size_t SlotOf(size_t index, uint64_t incarnation)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Makes slots free: those of replicas that were not seen lately, or new ones.
  void AddSlots() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const PickerOptions options_;
  base::Mutex mutex_;
  uint64_t turn_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string cache_id_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const cache::PrefixHasher> hasher_ ABSL_GUARDED_BY(mutex_);
  // Made when it is first needed.
  std::optional<PrefixMap> prefixes_ ABSL_GUARDED_BY(mutex_);
  std::vector<Slot> slots_ ABSL_GUARDED_BY(mutex_);
  std::vector<size_t> free_slots_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<uint64_t, size_t> slot_of_ ABSL_GUARDED_BY(mutex_);
  // By the replica's place in the list of the last turn. May be outdated.
  std::vector<size_t> last_slots_ ABSL_GUARDED_BY(mutex_);
  // Until this turn no slot can become free.
  uint64_t no_slots_until_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace kvasir::router
