// The cache as the scheduler sees it: which sequence holds which pages, what a
// prompt can reuse, and what every page is spent on. Names pages, touches no
// bytes: the executor does, from the deltas and copies taken here.
//
// Life of a sequence:
//
//   StartSequence -> { [Evict ->] Reserve -> TakeDeltas -> (the step runs) ->
//   Commit }* -> Release, or Preempt and StartSequence again with all tokens so
//   far, or Export to the host pool and Import from there.
//
//   slots:  |  released  |     held, committed      | reserved | rest of page |
//           0      first_live * P              logical   logical + n
//            (behind a sliding window)
//
// Where sequences own side pages (exact windows), a prefix is found as far as
// a tail goes: a copy of the side pages of a sequence that had committed
// exactly so much. tail_policy.h says where there are some.
//
// A group that evicts holds no more than EvictionSchedule says: a sequence's
// steps end at next_eviction, and Evict comes before the step behind it. Scores
// lie in pages, beside the slots, and change with every query: no two sequences
// hold a page of such a group, none is published and none is found.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/strong_id.h"
#include "cache/eviction/eviction_schedule.h"
#include "cache/images/sequence_image.h"
#include "cache/layout/layout.h"
#include "cache/prefix/prefix_hash.h"
#include "cache/prefix/prefix_index.h"
#include "cache/tables/page_pool.h"
#include "google/protobuf/repeated_field.h"
#include "proto/kvasir/v1/step_plan.pb.h"

namespace kvasir::cache {

// StepPlan's sequence_id.
using SequenceId = base::StrongId<struct SequenceTag, int64_t>;

struct KvCacheConfig {
  struct Group {
    int64_t num_pages = 0;
    // Keys that a query sees at most, itself included; 0: all before it.
    int64_t sliding_window = 0;
    int64_t side_pages_per_sequence = 0;
    plan::EvictionCounts eviction;
    // Of one page id over the group's layers; only for byte figures.
    int64_t page_bytes = 0;
    int64_t payload_bytes = 0;  // page_bytes without padding
    // Of a sequence's side pages, what is used.
    int64_t side_payload_bytes = 0;
    // Of the host pool; 0: nothing can be exported.
    int64_t num_host_pages = 0;
  };
  int64_t page_tokens = 0;    // P
  std::vector<Group> groups;  // by PageGroupId
  std::string cache_id;       // enters every prefix hash
  // False: nothing is published and nothing is looked up; so where a group
  // evicts.
  bool prefix_reuse = true;
};

// prefix_reuse comes from the plan: layout.prefix_reusable().
// `host_pages`: of the host pool; empty: there is none.
KvCacheConfig MakeKvCacheConfig(const PageLayout& layout,
                                const PageCounts& pages, std::string cache_id,
                                const PageCounts& host_pages = {});

struct StartOptions {
  // Sequences share pages only under an equal salt.
  std::string salt;
  bool reuse_prefix = true;
  bool publish_prefix = true;
  // Tokens that are the prompt, for eviction; 0: all. What was emitted before a
  // preemption is no prompt.
  int64_t prompt_tokens = 0;
  // By page group, in place of the config's counts; empty: these. A group whose
  // config does not evict keeps to that.
  absl::Span<const plan::EvictionCounts> evictions;
};

struct StartResult {
  // Tokens whose pages were found; whole pages, and at least one token of the
  // prompt is left to compute. The first step starts here.
  int64_t cached_tokens = 0;
};

// An expected refusal is a value: the scheduler preempts or waits.
struct ReserveResult {
  bool ok = false;
  // Of the first group that falls short; free counts pages kept for reuse too.
  PageGroupId group;
  int64_t want_pages = 0;
  int64_t free_pages = 0;
  // Of a reservation: for how many tokens the group has pages; below 1: none.
  int64_t fits_tokens = 0;

  explicit operator bool() const { return ok; }
};

// num_pages == used_pages + free_pages.
struct PageGroupStats {
  int64_t num_pages = 0;
  int64_t used_pages = 0;    // referenced by a sequence
  int64_t free_pages = 0;    // can be taken at once, cached pages included
  int64_t cached_pages = 0;  // free, but still found by a prefix
  int64_t side_pages = 0;    // of the used pages: not for tokens
  int64_t tail_pages = 0;    // that a prefix finds: copies of side pages
  // Slots of used token pages; of them, those that hold a token.
  int64_t held_slots = 0;
  int64_t filled_slots = 0;
  // Slots that sequences hold, a shared slot once for each sequence.
  int64_t physical_tokens = 0;
  // num_pages, used_pages and cached_pages in bytes.
  int64_t pool_bytes = 0;
  int64_t used_bytes = 0;
  int64_t cached_bytes = 0;
  // Bytes of used token pages that hold nothing: padding of regions, and slots
  // without a token.
  int64_t padding_bytes = 0;
  int64_t unfilled_bytes = 0;
  // Of side_pages; of that, what holds nothing by the layout.
  int64_t side_bytes = 0;
  int64_t side_unused_bytes = 0;
  // Of the host pool; of them, those of images.
  int64_t host_pages = 0;
  int64_t host_used_pages = 0;
  int64_t host_bytes = 0;
  int64_t host_used_bytes = 0;
};

// Counts since construction, but for the gauges.
struct KvCacheStats {
  std::vector<PageGroupStats> groups;  // gauges
  int64_t sequences = 0;               // gauge
  int64_t logical_tokens = 0;          // gauge: seen by the live sequences
  // References to pages that no live sequence accounts for: 0, or a bug.
  int64_t leaked_pages = 0;    // gauge
  int64_t metadata_bytes = 0;  // gauge: host memory of pool, tables and index
  // Tokens of prompts that asked for reuse and ran; of those, found.
  int64_t query_tokens = 0;
  int64_t hit_tokens = 0;
  int64_t pages_allocated = 0;
  // Cached pages forgotten: taken for something else, or for room in the index.
  int64_t pages_evicted = 0;
  int64_t pages_copied = 0;  // copy-on-write, and side pages
  int64_t pages_published = 0;
  int64_t pages_unpublished = 0;  // full pages not published: index full
  int64_t tails_published = 0;
  int64_t pages_window_released = 0;
  int64_t evictions = 0;  // of a sequence in a group
  int64_t slots_evicted = 0;
  int64_t pages_reclaimed = 0;  // by evictions
  int64_t page_hashes = 0;
  int64_t table_entries_sent = 0;
  int64_t forks = 0;
  int64_t preemptions = 0;
  int64_t exports = 0;  // of the preemptions
  int64_t imports = 0;
  int64_t bytes_exported = 0;
  int64_t bytes_imported = 0;
};

// Owns: the pools of all page groups, the host pool's, block tables, the prefix
//   index.
// Threads: scheduler thread only.
// Errors: "no pages" is a ReserveResult; misuse (unknown sequence, commit
// beyond the reservation) is a CHECK.
class KvCache {
 public:
  // `hasher` replaces the keyed hash (tests inject a weak one); null: the keyed
  // hash under config.cache_id. CHECKs the config: at least one group, page
  // counts >= 1.
  explicit KvCache(KvCacheConfig config,
                   std::unique_ptr<PrefixHasher> hasher = nullptr);
  ~KvCache();
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  // Adds a sequence that is about to run `token_ids` (the prompt, and after a
  // preemption or a move also what was emitted). Takes references to the pages
  // found, allocates none. `id` must not be live.
  StartResult StartSequence(SequenceId id, absl::Span<const int32_t> token_ids,
                            const StartOptions& options);

  // What StartSequence would find now, changing nothing.
  int64_t CachedPrefixTokens(absl::Span<const int32_t> token_ids,
                             const StartOptions& options) const;

  // Makes slots [logical, logical + new_tokens) writable: allocates what is
  // missing, side pages (copies of the tail that was found) and the copy of a
  // fork's last page included. All or nothing; on refusal nothing changed.
  // Replaces an earlier reservation that was not committed. new_tokens >= 1,
  // and none beyond next_eviction; no eviction is due (CHECK). With an
  // observation window those of one step are all of the prompt, or none is
  // (TakeDeltas).
  ReserveResult Reserve(SequenceId id, int64_t new_tokens);

  // The step has written the reserved slots: `token_ids` are the tokens whose
  // latents now lie there (not the token that was sampled from them). Publishes
  // pages that became full, and a tail where one belongs; gives up pages behind
  // a sliding window. At most as many as reserved; the others stay reserved.
  void Commit(SequenceId id, absl::Span<const int32_t> token_ids);

  // The sequence has come to a point where slots go, before its next step.
  bool eviction_due(SequenceId id) const;
  // Gives them up, in every group where it is due: tables end behind the slots
  // that stay, and pages behind them are free at once, for whoever takes them
  // writes behind the eviction in the same step. It always succeeds. No
  // reservation is open (CHECK).
  void Evict(SequenceId id);
  // Tokens at which the sequence's next step ends at the latest; nothing: it
  // never evicts.
  std::optional<int64_t> next_eviction(SequenceId id) const;

  // Tells a step of the sequence's tables. Appends to block_tables what changed
  // since the last call: nothing where nothing did; the first deltas after
  // StartSequence or Fork are resets, later ones never: tables only grow at the
  // end and go at the front. Appends to physical_starts, for each group, where
  // the next token's slot lies: entry physical_start / P of the group's table.
  // Only where slots were evicted it is less than the logical tokens. And to
  // first_counted, where some group has an observation window: the step has the
  // tokens that are reserved, but for the first `written_before` of them, which
  // a step before it has (can_run_ahead).
  void TakeDeltas(SequenceId id, kvasir::v1::SequenceStep* out,
                  int64_t written_before = 0);

  // Appends the copies that the next step must do, in this order and before
  // anything is written. Call once per step, after all its reservations.
  void TakePageCopies(
      google::protobuf::RepeatedPtrField<kvasir::v1::PageCopy>* out);

  // The evictions likewise: each says which of the copies come before it, so
  // both are taken at the same time.
  void TakeEvictions(
      google::protobuf::RepeatedPtrField<kvasir::v1::SlotEviction>* out);

  // `child` (not live) shares the full pages of `parent`, which must have no
  // open reservation. A partly filled last page is copied when the child first
  // reserves; the parent goes on writing in its own: it only adds slots behind
  // those that the child copies. Side pages and pages of groups that evict are
  // copied at once, for the parent writes over them: only where can_fork
  // (CHECK).
  void Fork(SequenceId parent, SequenceId child);

  // Forgets the sequence; its full pages stay findable until they are taken.
  void Release(SequenceId id);
  // The same, counted as a preemption. StartSequence with the same id (or
  // another) and all tokens so far computes the sequence again.
  void Preempt(SequenceId id);

  // Images (kv_cache_images.cc). All copies between the pools are those of the
  // next step (TakePageCopies), in their order among the others: a page, of
  // either pool, may be taken for something else as soon as its copy is listed.

  // Of what the sequence has committed.
  ImageShape ShapeOf(SequenceId id) const;
  // Bytes of such an image's pages.
  int64_t ImageBytes(const ImageShape& shape) const;
  // Tokens of the sequence's full pages that others hold as well: a sequence
  // that starts again would find them.
  int64_t SharedTokens(SequenceId id) const;

  // Lists copies of the sequence's pages to the host pool and forgets it, as
  // Preempt. Empty, and nothing changed, where the host pool has too few pages.
  // An open reservation is dropped.
  std::optional<SequenceImage> Export(SequenceId id);

  // Brings it back as the sequence `id` (not live). Full pages that a prefix
  // finds are shared, the others are the sequence's own, and are found from now
  // on. `token_ids` are its committed ones, and may be more: then there must be
  // pages for one of them, too. Empties the image; on refusal nothing changed.
  // The image must be of this cache's host pool, and `options` those of the
  // start: prompt and evictions decide which slots it holds.
  ReserveResult Import(SequenceId id, SequenceImage* image,
                       absl::Span<const int32_t> token_ids,
                       const StartOptions& options);

  // Pages of the host pool for an image whose bytes come from elsewhere.
  // `options` are those of the Import that follows; where a group evicts they
  // say what is the prompt (CHECK). INVALID_ARGUMENT for a shape that no
  // sequence of that prompt and these evictions has, RESOURCE_EXHAUSTED where
  // too few are free.
  absl::StatusOr<SequenceImage> TakeImagePages(const ImageShape& shape,
                                               const StartOptions& options);

  // Tokens committed, and the reserved ones after them.
  int64_t logical_tokens(SequenceId id) const;
  int64_t reserved_tokens(SequenceId id) const;
  // Slots held for committed tokens: logical, less what a window gave up and
  // what was evicted.
  int64_t physical_tokens(SequenceId id, PageGroupId group) const;
  // Pages that releasing the sequence would free (pages nobody else holds),
  // summed over the groups.
  int64_t PagesFreedByRelease(SequenceId id) const;
  // Page ids of the sequence's table from first_live on, and of its side pages.
  std::vector<PageId> Pages(SequenceId id, PageGroupId group) const;
  std::vector<PageId> SidePages(SequenceId id, PageGroupId group) const;

  int64_t page_tokens() const { return config_.page_tokens; }
  // Whether a step may be told before the tokens of the one before it are
  // committed: not where a commit copies pages that this step writes over.
  bool can_run_ahead() const { return !has_side_pages_; }
  // There are pages for copies of those that a fork does not share.
  bool can_fork(SequenceId parent) const;
  // Where a step of the sequence should end, should it reach that far, so that
  // a tail is published there; 0: anywhere.
  int64_t tail_cut(SequenceId id) const;
  int64_t num_page_groups() const {
    return static_cast<int64_t>(config_.groups.size());
  }
  int64_t num_pages(PageGroupId group) const {
    return pools_[static_cast<size_t>(group.value())]->num_pages();
  }
  // What a reservation can get now, pages kept for reuse included.
  int64_t available_pages(PageGroupId group) const {
    return pools_[static_cast<size_t>(group.value())]->available_pages();
  }
  // The same for one sequence: the pages of a tail that it alone holds, too.
  int64_t available_pages(SequenceId id, PageGroupId group) const;
  // What a sequence holds in a group: never more than num_pages is admissible.
  SequencePages sequence_pages(PageGroupId group) const;

  // Makes every cached page plain free.
  void DropPrefixCache();

  KvCacheStats Stats() const;

  // INTERNAL with the first contradiction found between counters, tables, pools
  // and index. Walks everything: for tests and debugging.
  absl::Status CheckInvariants() const;

 private:
  struct GroupState;
  struct Sequence;
  // The longest prefix of a prompt that the index can serve.
  struct Hit {
    std::vector<PrefixNodeId> nodes;  // by page
    // Pages found, tail or not: more than nodes where sequences need one.
    int64_t num_pages = 0;
  };

  Sequence& sequence(SequenceId id);
  const Sequence& sequence(SequenceId id) const;
  PagePool& pool(PageGroupId group) {
    return *pools_[static_cast<size_t>(group.value())];
  }
  const PagePool& pool(PageGroupId group) const {
    return *pools_[static_cast<size_t>(group.value())];
  }
  PageGroupId group_id(size_t index) const {
    return PageGroupId(static_cast<int32_t>(index));
  }

  Sequence& AddSequence(SequenceId id);
  Hit FindPrefix(absl::Span<const int32_t> token_ids,
                 const StartOptions& options, int64_t* page_hashes) const;
  // The first page that the token behind so many sees.
  int64_t FirstVisiblePage(size_t group, int64_t num_pages) const;
  void TakePrefix(const Hit& hit, Sequence& out);

  EvictionSchedule ScheduleOf(size_t group, absl::Span<const int32_t> token_ids,
                              const StartOptions& options) const;
  int64_t MissingPages(const Sequence& of, size_t group,
                       int64_t new_tokens) const;
  void AllocateMissing(Sequence& of, size_t group, int64_t new_tokens);
  PagePin AllocatePage(PageGroupId group);
  bool TakeOverForkPage(Sequence& of, size_t group);
  kvasir::v1::PageCopy& ListCopy(size_t group, PageId from, PageId to);
  void CopyPage(size_t group, PageId from, PageId to);
  bool AllocateHostPages(SequenceImage* image);
  std::vector<PrefixNodeId> FindPages(absl::Span<const int32_t> token_ids,
                                      const StartOptions& options) const;
  void ImportPages(size_t group, const SequenceImage& image,
                   const std::vector<PrefixNodeId>& found, Sequence* out);
  absl::Status CheckShape(const ImageShape& shape,
                          const StartOptions& options) const;

  void HoldTail(PrefixNodeId node, Sequence& out);
  bool HoldsTailAlone(const Sequence& of) const;
  void TakeOverTail(Sequence& of);
  void AllocateSidePages(Sequence& of, size_t group);
  void ForkSidePages(const Sequence& parent, Sequence& child);
  void ForkPages(const Sequence& parent, size_t group, Sequence& child);
  void CopyPages(const Sequence& parent, size_t group, Sequence& child);
  void PublishTail(Sequence& of);
  bool MakeRoomForTail(Sequence& of);
  std::vector<std::vector<PagePin>> AllocateTail();

  void FillPages(Sequence& of, int64_t new_tokens);
  void PublishFullPages(Sequence& of, absl::Span<const int32_t> token_ids);
  void PublishPage(Sequence& of, int64_t index);
  bool EvictForIndex();
  void ReleaseBehindWindows(Sequence& of);

  absl::Status CheckSequence(SequenceId id, const Sequence& of) const;
  absl::Status CheckReferences() const;
  PageGroupStats GroupStats(size_t group) const;

  const KvCacheConfig config_;
  const bool has_side_pages_;
  const bool observes_;  // some group has an observation window
  const std::unique_ptr<PrefixHasher> hasher_;
  std::vector<std::unique_ptr<PagePool>> pools_;  // by PageGroupId
  std::vector<std::unique_ptr<PagePool>> host_pools_;
  std::unique_ptr<PrefixIndex> index_;
  absl::flat_hash_map<SequenceId, std::unique_ptr<Sequence>> sequences_;
  std::vector<kvasir::v1::PageCopy> pending_copies_;
  std::vector<kvasir::v1::SlotEviction> pending_evictions_;
  KvCacheStats counts_;  // without the gauges
};

}  // namespace kvasir::cache
