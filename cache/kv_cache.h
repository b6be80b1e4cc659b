// The cache as the scheduler sees it. KvCache knows which pages each sequence
// holds, which pages a prompt can reuse, and what every page is used for. It
// handles only page ids. The executor has the pages' bytes. It receives the
// changes of block tables (TakeDeltas) and a list of the pages to copy
// (TakePageCopies) from here.
//
// Life of a sequence:
//
//   StartSequence -> { [Evict ->] Reserve -> TakeDeltas -> (the step runs) ->
//   Commit }* -> Release, or Preempt and StartSequence again with all tokens so
//   far, or Export to the host pool and Import from there.
//
//   slots:  |  released  |     held, committed      | reserved | rest of page |
//           0      first_live * P              logical   logical + n
//   Released: outside a sliding window. P: slots per page. n: reserved slots.
//
// In a page group that evicts, a sequence holds at most as many slots as
// EvictionSchedule says. Its steps end at next_eviction at the latest, and
// Evict must be called before the step after that. The pages of such a group
// also hold scores that change with every query. So sequences never share these
// pages, and prompts never find them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cache/images/host_images.h"
#include "cache/images/sequence_image.h"
#include "cache/layout/layout.h"
#include "cache/pages/kv_cache_config.h"
#include "cache/pages/kv_cache_stats.h"
#include "cache/pages/page_copies.h"
#include "cache/pages/page_pool.h"
#include "cache/prefix/prefix_cache.h"
#include "cache/prefix/prefix_hash.h"
#include "cache/tables/sequence_tables.h"
#include "google/protobuf/repeated_field.h"
#include "proto/kvasir/v1/step_plan.pb.h"

namespace kvasir::cache {

struct StartResult {
  // The number of the prompt's tokens whose pages were found in the cache: a
  // multiple of page_tokens, and less than the prompt's length. The first step
  // begins with the next token.
  int64_t cached_tokens = 0;
};

// Composes PrefixCache (pools and index), SequenceTables and HostImages.
// Owns: these three, the page copies of the next step, and the state of every
// live sequence.
// Threads: used only by the scheduler thread.
// Errors: if a pool has too few free pages, the result is a ReserveResult that
// is not ok. Misuse (an unknown sequence, a commit beyond the reservation) is
// a CHECK.
class KvCache {
 public:
  // If `hasher` is null, the cache makes one with MakePrefixHasher(cache_id);
  // tests pass a weak hash. CHECKs that the config has at least one group, and
  // that all page counts are at least 1.
  explicit KvCache(KvCacheConfig config,
                   std::unique_ptr<PrefixHasher> hasher = nullptr);
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  // Adds a sequence that is about to run `token_ids`: the prompt and, after a
  // preemption or on another worker, also the tokens that were already emitted.
  // Takes references to cached pages that it finds, and allocates no pages.
  // `id` must not be in use.
  StartResult StartSequence(SequenceId id, absl::Span<const int32_t> token_ids,
                            const StartOptions& options);

  // Returns how many tokens StartSequence would find now. Changes nothing.
  int64_t CachedPrefixTokens(absl::Span<const int32_t> token_ids,
                             const StartOptions& options) const;

  // Reserves slots for the next `new_tokens` tokens, and allocates the pages
  // that they need. The first reservation also allocates side pages, and in a
  // fork the copy of the parent's last page. If too few pages are free, nothing
  // changes. Replaces an earlier reservation that was not committed. CHECKs
  // that new_tokens >= 1, that no eviction is due, and that the reservation
  // ends at next_eviction at the latest. If a group has an observation window,
  // TakeDeltas CHECKs that all tokens of a step are of the prompt, or none.
  ReserveResult Reserve(SequenceId id, int64_t new_tokens) {
    return tables_.Reserve(new_tokens, &sequence(id).state);
  }

  // Records that a step has written slots for `token_ids`, at most as many as
  // were reserved; the other slots stay reserved. `token_ids` does not include
  // the token that the step sampled, because the next step writes its slot.
  // Publishes full pages for other prompts, and a copy of the side pages (a
  // tail) if TailPolicy wants one at this length. Gives up pages that are
  // outside a sliding window.
  void Commit(SequenceId id, absl::Span<const int32_t> token_ids);

  // True if slots of the sequence must be evicted before its next step.
  bool eviction_due(SequenceId id) const {
    return sequence(id).state.EvictionDue();
  }
  // Evicts slots in every group whose eviction is due, and frees the pages
  // after the slots that stay. The next step may already reuse these pages,
  // because it evicts before it writes. No reservation may be open (CHECK).
  void Evict(SequenceId id) { tables_.Evict(id, &sequence(id).state); }
  // The number of tokens at which the sequence's next step must end at the
  // latest. Empty: the sequence never evicts.
  std::optional<int64_t> next_eviction(SequenceId id) const {
    return sequence(id).state.NextEviction();
  }

  // Fills in the sequence's part of a step.
  // block_tables: the changes since the last call, if any. The first deltas
  //   after StartSequence or Fork are resets. Later ones add entries at the end
  //   and release them at the front. TakeEvictions reports evictions instead.
  // physical_starts: for each group, the slot of the next token. It is below
  //   the logical length only if slots were evicted.
  // first_counted: for each group, the first token whose attention counts for
  //   evictions. Filled only if a group has an observation window.
  // The step runs the reserved tokens except the first `written_before`, which
  // an earlier step runs (can_run_ahead).
  void TakeDeltas(SequenceId id, kvasir::v1::SequenceStep* out,
                  int64_t written_before = 0) {
    tables_.TakeDeltas(&sequence(id).state, out, written_before);
  }

  // Appends the copies that the next step must do, in this order and before it
  // writes anything. Call it once per step, after all reservations.
  void TakePageCopies(
      google::protobuf::RepeatedPtrField<kvasir::v1::PageCopy>* out) {
    copies_.Take(out);
  }

  // Appends the evictions of the next step. Each one states how many of the
  // page copies come before it, so take copies and evictions at the same time.
  void TakeEvictions(
      google::protobuf::RepeatedPtrField<kvasir::v1::SlotEviction>* out) {
    tables_.TakeEvictions(out);
  }

  // Starts `child`, a new id, with all tokens of `parent`, which must have no
  // open reservation. Full pages are shared. A partly filled last page is
  // copied when the child first reserves. Until then the parent only adds slots
  // to this page, so the slots to be copied do not change. Side pages, and
  // pages of groups that evict, are copied at once, because the parent
  // overwrites them. Call it only if can_fork (CHECK).
  void Fork(SequenceId parent, SequenceId child);

  // Ends the sequence. Its full pages can be found by other prompts until they
  // are reused.
  void Release(SequenceId id);
  // Like Release, but counted as a preemption. To continue the sequence, call
  // StartSequence with all its tokens so far; the id may be another one.
  void Preempt(SequenceId id);

  // Images are copies of a sequence's pages in the host pool. The next step
  // does all copies between the pools, in one ordered list with the other
  // copies (TakePageCopies). So a page of either pool may be reused as soon as
  // the copy that reads it is listed.

  // The shape that an image of the sequence's committed tokens would have.
  ImageShape ShapeOf(SequenceId id) const {
    return images_.ShapeOf(sequence(id).state);
  }
  // The total size in bytes of the pages in an image of this shape.
  int64_t ImageBytes(const ImageShape& shape) const {
    return images_.Bytes(shape);
  }
  // The number of the sequence's tokens in full pages that other sequences hold
  // too. If the sequence were released and started again, it would find these
  // pages.
  int64_t SharedTokens(SequenceId id) const {
    return tables_.SharedTokens(sequence(id).state);
  }

  // Ends the sequence like Preempt, but first adds copies of its pages to the
  // host pool to the list of page copies. An open reservation is dropped. If
  // the host pool has too few free pages, returns nothing and changes nothing.
  std::optional<SequenceImage> Export(SequenceId id);

  // Brings an image from this cache's host pool back as the sequence `id`,
  // which is not in use, and empties the image. Full pages that the prefix
  // index still has are shared. The others are copied from the host pool, and
  // later prompts can find them. `token_ids` are the image's committed tokens,
  // possibly followed by further ones. If there are further ones, the import
  // also needs room for the next token. `options` must equal those of
  // StartSequence, because they determine which slots the image holds. If the
  // import is refused, nothing changes.
  ReserveResult Import(SequenceId id, SequenceImage* image,
                       absl::Span<const int32_t> token_ids,
                       const StartOptions& options);

  // Takes pages of the host pool for an image whose bytes come from elsewhere.
  // `options` are those of the Import that follows; if a group evicts, they
  // must state the prompt's length (CHECK).
  //   INVALID_ARGUMENT     no sequence that starts with these options has this
  //                        shape
  //   FAILED_PRECONDITION  page copies of the next step still use the host pool
  //   RESOURCE_EXHAUSTED   too few pages are free
  absl::StatusOr<SequenceImage> TakeImagePages(const ImageShape& shape,
                                               const StartOptions& options) {
    return images_.TakePages(shape, options);
  }

  // Tokens that are committed (logical_tokens), and tokens that are reserved
  // after them (reserved_tokens).
  int64_t logical_tokens(SequenceId id) const {
    return sequence(id).state.logical_tokens();
  }
  int64_t reserved_tokens(SequenceId id) const {
    return sequence(id).state.reserved_tokens;
  }
  // The number of slots that hold committed tokens: logical_tokens minus the
  // tokens that a sliding window or an eviction gave up.
  int64_t physical_tokens(SequenceId id, PageGroupId group) const {
    return group_state(id, group).table.physical_tokens();
  }
  // The number of pages that Release would free, summed over the groups. Pages
  // that other sequences hold do not count.
  int64_t PagesFreedByRelease(SequenceId id) const {
    return tables_.PagesFreedByRelease(sequence(id).state);
  }
  // Pages returns the pages in the sequence's block table, from entry
  // first_live on; SidePages returns its side pages.
  std::vector<PageId> Pages(SequenceId id, PageGroupId group) const;
  std::vector<PageId> SidePages(SequenceId id, PageGroupId group) const;

  int64_t page_tokens() const { return config_.page_tokens; }
  // Returns whether a step may be planned before the tokens of the previous
  // step are committed. With side pages it may not: a commit may cache a copy
  // of them (a tail), but a step planned before it would overwrite them first.
  bool can_run_ahead() const { return !config_.has_side_pages(); }
  // Returns whether there are pages for the copies that Fork makes at once.
  bool can_fork(SequenceId parent) const {
    return tables_.CanFork(sequence(parent).state);
  }
  // The number of tokens at which a step of the sequence should end if it
  // reaches that far. A copy of the side pages (a tail) is then cached there.
  // 0: no preference.
  int64_t tail_cut(SequenceId id) const;
  int64_t num_page_groups() const {
    return static_cast<int64_t>(config_.groups.size());
  }
  int64_t num_pages(PageGroupId group) const { return pool(group).num_pages(); }
  // The number of pages that a reservation can get now, cached pages included.
  int64_t available_pages(PageGroupId group) const {
    return pool(group).available_pages();
  }
  // The number of pages that the sequence `id` can get now, including the pages
  // of a tail that only this sequence holds.
  int64_t available_pages(SequenceId id, PageGroupId group) const {
    return tables_.AvailablePages(sequence(id).state,
                                  static_cast<size_t>(group.value()));
  }
  // Returns a calculator of how many pages of the group a sequence needs. A
  // sequence that would need more than num_pages must not be admitted.
  SequencePages sequence_pages(PageGroupId group) const;

  // Makes every cached page free.
  void DropPrefixCache() { cache_.DropAll(); }

  KvCacheStats Stats() const;

  // Returns INTERNAL with the first contradiction found between counters,
  // tables, pools and index. It walks all of them, so it is for tests and
  // debugging.
  absl::Status CheckInvariants() const;

 private:
  struct Sequence {
    explicit Sequence(const KvCacheConfig& config) : state(config) {}

    SequenceState state;
    PrefixChain prefix;
    // The first commit adds these numbers to the statistics query_tokens and
    // hit_tokens. They are not added earlier, because a sequence whose first
    // reservation is refused starts again later and must not count twice.
    int64_t uncounted_query_tokens = 0;
    int64_t uncounted_hit_tokens = 0;
  };

  Sequence& sequence(SequenceId id);
  const Sequence& sequence(SequenceId id) const;
  const GroupState& group_state(SequenceId id, PageGroupId group) const {
    return sequence(id).state.groups[static_cast<size_t>(group.value())];
  }
  const PagePool& pool(PageGroupId group) const {
    return cache_.pool(static_cast<size_t>(group.value()));
  }
  Sequence& AddSequence(SequenceId id);
  void SetSchedules(size_t num_tokens, const StartOptions& options,
                    Sequence* out) const;
  void PublishPages(absl::Span<const int32_t> token_ids, Sequence* entry);
  std::vector<const SequenceState*> States() const;

  const KvCacheConfig config_;
  KvCacheStats counts_;  // without gauges; Stats() computes them
  PageCopies copies_;
  PrefixCache cache_;
  SequenceTables tables_;
  HostImages images_;
  absl::flat_hash_map<SequenceId, std::unique_ptr<Sequence>> sequences_;
};

}  // namespace kvasir::cache
