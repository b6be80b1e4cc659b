// Manages the block tables and side pages of sequences: makes them grow, fork
// and shrink, and reports their changes to the executor. PrefixCache provides
// the pages, and PageCopies collects the page copies.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "cache/pages/kv_cache_config.h"
#include "cache/pages/kv_cache_stats.h"
#include "cache/pages/page_copies.h"
#include "cache/prefix/prefix_cache.h"
#include "cache/tables/sequence_state.h"
#include "google/protobuf/repeated_field.h"
#include "proto/kvasir/v1/step_plan.pb.h"

namespace kvasir::cache {

// Whether pages could be reserved. A refusal is not an error: the scheduler
// preempts a sequence or waits.
struct ReserveResult {
  bool ok = false;
  // The first group that has too few pages. `free_pages` includes cached pages.
  PageGroupId group;
  int64_t want_pages = 0;
  int64_t free_pages = 0;
  // After a refused reservation: the number of tokens for which the group has
  // pages. Below 1: not even one token.
  int64_t fits_tokens = 0;

  explicit operator bool() const { return ok; }
};

// Implements operations on sequences that kv_cache.h documents, like Reserve
// and Fork. The caller owns the state of the sequences and passes it as a
// parameter. `cache`, `copies` and `counts` must outlive this object.
// Owns: the list of slot evictions of the next step.
// Threads: used only by the scheduler thread.
// Errors: if a pool has too few free pages, the result is a ReserveResult that
// is not ok. Misuse is a CHECK.
class SequenceTables {
 public:
  SequenceTables(const KvCacheConfig& config, PrefixCache* cache,
                 PageCopies* copies, KvCacheStats* counts);

  // Gives a new sequence the pages of a prefix hit, and references to the hit's
  // tail.
  void TakePrefix(const PrefixHit& hit, SequenceState* out);
  ReserveResult Reserve(int64_t new_tokens, SequenceState* sequence);
  // Records that `num_tokens` of the reserved slots have been written.
  void Commit(int64_t num_tokens, SequenceState* sequence);
  // Lists copies of the sequence's side pages into the pages of a new tail.
  void CopySidePages(const SequenceState& sequence, const TailPages& to);
  void ReleaseOutsideWindows(SequenceState* sequence);
  void Evict(SequenceId id, SequenceState* sequence);

  bool CanFork(const SequenceState& parent) const;
  void Fork(const SequenceState& parent, SequenceState* child);

  void TakeDeltas(SequenceState* sequence, kvasir::v1::SequenceStep* out,
                  int64_t written_before);
  void TakeEvictions(
      google::protobuf::RepeatedPtrField<kvasir::v1::SlotEviction>* out);

  // The number of pages of the group that the sequence can get, including those
  // of a tail that only this sequence holds.
  int64_t AvailablePages(const SequenceState& sequence, size_t group) const;
  int64_t PagesFreedByRelease(const SequenceState& sequence) const;
  int64_t SharedTokens(const SequenceState& sequence) const;

  // The states of all live sequences, for the functions below.
  using States = absl::Span<const SequenceState* const>;
  // All statistics of a page group except those of the host pool.
  PageGroupStats GroupStats(size_t group, States sequences) const;
  // Returns INTERNAL with the first contradiction between tables, pools and
  // index.
  absl::Status CheckSequence(SequenceId id,
                             const SequenceState& sequence) const;
  absl::Status CheckReferences(States sequences) const;

 private:
  PagePool& pool(size_t group) const { return cache_.pool(group); }
  size_t num_groups() const { return config_.groups.size(); }
  int64_t MissingPages(const SequenceState& sequence, size_t group,
                       int64_t new_tokens) const;
  void AllocateMissing(SequenceState* sequence, size_t group,
                       int64_t new_tokens);
  void TakeOverForkPage(GroupState* state, size_t group);
  void CopyPage(size_t group, PageId from, PageId to);
  void HoldTail(PrefixNodeId node, SequenceState* out);
  // True if the sequence has found a tail, has not copied it yet, and nothing
  // else holds the tail.
  bool HoldsUnsharedTail(const SequenceState& sequence) const;
  void TakeOverTail(SequenceState* sequence);
  void AllocateSidePages(GroupState* state, size_t group);
  void ForkPages(const GroupState& from, size_t group, GroupState* to);
  void CopyPages(const GroupState& from, size_t group, GroupState* to);
  void ForkSidePages(const SequenceState& parent, SequenceState* child);

  const KvCacheConfig& config_;
  const bool observes_;  // at least one group has an observation window
  PrefixCache& cache_;
  PageCopies& copies_;
  KvCacheStats& counts_;
  std::vector<kvasir::v1::SlotEviction> evictions_;
};

}  // namespace kvasir::cache
