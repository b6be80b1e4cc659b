#include "cache/tables/sequence_tables.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace kvasir::cache {
namespace {

bool Observes(const KvCacheConfig& config) {
  return std::any_of(config.groups.begin(), config.groups.end(),
                     [](const KvCacheConfig::Group& group) {
                       return group.eviction.observation_window > 0;
                     });
}

}  // namespace

EvictionSchedule ScheduleOf(const KvCacheConfig& config, size_t group,
                            size_t num_tokens, const StartOptions& options) {
  KVASIR_CHECK(options.evictions.empty() ||
               options.evictions.size() == config.groups.size());
  if (!config.groups[group].eviction.evicts()) return {};
  const plan::EvictionCounts& counts = options.evictions.empty()
                                           ? config.groups[group].eviction
                                           : options.evictions[group];
  if (!counts.evicts()) return {};
  return EvictionSchedule(counts, options.prompt_tokens > 0
                                      ? options.prompt_tokens
                                      : static_cast<int64_t>(num_tokens));
}

SequenceTables::SequenceTables(const KvCacheConfig& config, PrefixCache* cache,
                               PageCopies* copies, KvCacheStats* counts)
    : config_(config),
      observes_(Observes(config)),
      cache_(*cache),
      copies_(*copies),
      counts_(*counts) {}

void SequenceTables::CopyPage(size_t group, PageId from, PageId to) {
  copies_.List(GroupIdOf(group), from, to);
  ++counts_.pages_copied;
}

// ---------------------------------------------------------------------------
// Starting and reserving
// ---------------------------------------------------------------------------

void SequenceTables::TakePrefix(const PrefixHit& hit, SequenceState* out) {
  const auto num_pages = static_cast<int64_t>(hit.nodes.size());
  const int64_t tokens = num_pages * config_.page_tokens;
  for (size_t g = 0; g < num_groups(); ++g) {
    BlockTable& table = out->groups[g].table;
    const int64_t first = cache_.FirstVisiblePage(g, num_pages);
    table.AppendReleased(first);
    for (int64_t i = first; i < num_pages; ++i) {
      const PageId page = cache_.page(hit.nodes[static_cast<size_t>(i)], g);
      table.Append(pool(g).Share(page));
    }
    table.SetFound(tokens);
  }
  if (num_pages > 0 && config_.has_side_pages()) {
    HoldTail(hit.nodes.back(), out);
  }
}

void SequenceTables::HoldTail(PrefixNodeId node, SequenceState* out) {
  const TailPages& tail = cache_.tail(node);
  for (size_t g = 0; g < num_groups(); ++g) {
    for (const PageId page : tail[g]) {
      out->groups[g].tail_pages.push_back(pool(g).Share(page));
    }
  }
  cache_.KeepTail(node);
}

int64_t SequenceTables::MissingPages(const SequenceState& sequence,
                                     size_t group, int64_t new_tokens) const {
  const GroupState& state = sequence.groups[group];
  const int64_t side_pages = config_.groups[group].side_pages_per_sequence -
                             static_cast<int64_t>(state.side_pages.size());
  return state.table.MissingEntries(new_tokens) + side_pages;
}

ReserveResult SequenceTables::Reserve(int64_t new_tokens,
                                      SequenceState* sequence) {
  KVASIR_CHECK(new_tokens >= 1 && !sequence->EvictionDue());
  const std::optional<int64_t> next = sequence->NextEviction();
  KVASIR_CHECK(!next || sequence->logical_tokens() + new_tokens <= *next);
  const bool unshared_tail = HoldsUnsharedTail(*sequence);
  bool takes_tail = false;
  for (size_t g = 0; g < num_groups(); ++g) {
    const GroupState& state = sequence->groups[g];
    const int64_t want = MissingPages(*sequence, g, new_tokens);
    const int64_t have = pool(g).available_pages();
    if (want <= have) continue;
    if (want == have + 1 && state.CanTakeOver(pool(g))) continue;
    const auto tail = static_cast<int64_t>(state.tail_pages.size());
    if (unshared_tail && want - tail <= have) {
      takes_tail = true;
      continue;
    }
    const BlockTable& table = state.table;
    const int64_t entries =
        table.num_entries() + have + table.MissingEntries(new_tokens) - want;
    return {.ok = false,
            .group = GroupIdOf(g),
            .want_pages = want,
            .free_pages = have,
            .fits_tokens = entries * config_.page_tokens - table.next_slot()};
  }
  if (takes_tail) TakeOverTail(sequence);
  for (size_t g = 0; g < num_groups(); ++g)
    AllocateMissing(sequence, g, new_tokens);
  sequence->reserved_tokens = new_tokens;
  return {.ok = true};
}

void SequenceTables::AllocateMissing(SequenceState* sequence, size_t group,
                                     int64_t new_tokens) {
  GroupState& state = sequence->groups[group];
  if (MissingPages(*sequence, group, new_tokens) >
      pool(group).available_pages()) {
    TakeOverForkPage(&state, group);
  }
  AllocateSidePages(&state, group);
  for (int64_t n = state.table.MissingEntries(new_tokens); n > 0; --n) {
    PagePin page = cache_.Allocate(group);
    if (state.fork_page) {
      CopyPage(group, state.fork_page.page(), page.page());
      pool(group).SetFilledSlots(
          page.page(),
          static_cast<int32_t>(state.table.next_slot() % config_.page_tokens));
      state.fork_page.Reset();
    }
    state.table.Append(std::move(page));
  }
}

// Called if no page is free for the copy of the parent's last page, but nothing
// except the fork holds that page any more. The fork then uses the page itself.
void SequenceTables::TakeOverForkPage(GroupState* state, size_t group) {
  KVASIR_CHECK(state->CanTakeOver(pool(group)));
  const PageId page = state->fork_page.page();
  // The parent may have filled and published the page before it ended. The fork
  // will write into it, so it must no longer be found.
  if (pool(group).tag(page) >= 0) cache_.Forget(group, page);
  const int64_t filled = state->table.next_slot() % config_.page_tokens;
  pool(group).SetFilledSlots(page, static_cast<int32_t>(filled));
  state->table.Append(std::move(state->fork_page));
}

bool SequenceTables::HoldsUnsharedTail(const SequenceState& sequence) const {
  bool any = false;
  for (size_t g = 0; g < num_groups(); ++g) {
    for (const PagePin& page : sequence.groups[g].tail_pages) {
      if (pool(g).references(page.page()) > 1) return false;
      any = true;
    }
  }
  return any;
}

// Called if no pages are free for copies of the tail, but nothing except the
// sequence holds the tail. The sequence then uses the tail's own pages.
void SequenceTables::TakeOverTail(SequenceState* sequence) {
  for (size_t g = 0; g < num_groups(); ++g) {
    GroupState& state = sequence->groups[g];
    for (const PagePin& page : state.tail_pages) {
      cache_.ForgetTailOf(g, page.page());
    }
    KVASIR_CHECK(state.side_pages.empty());
    state.side_pages = std::exchange(state.tail_pages, {});
  }
}

void SequenceTables::AllocateSidePages(GroupState* state, size_t group) {
  const int64_t side_pages = config_.groups[group].side_pages_per_sequence;
  while (static_cast<int64_t>(state->side_pages.size()) < side_pages) {
    state->side_pages.push_back(cache_.Allocate(group));
  }
  // The step does its copies before it writes anything. So the tail's pages may
  // be reused as soon as the copies are listed.
  for (size_t i = 0; i < state->tail_pages.size(); ++i) {
    CopyPage(group, state->tail_pages[i].page(), state->side_pages[i].page());
  }
  state->tail_pages.clear();
}

// ---------------------------------------------------------------------------
// Committing and giving up slots
// ---------------------------------------------------------------------------

void SequenceTables::Commit(int64_t num_tokens, SequenceState* sequence) {
  KVASIR_CHECK(num_tokens <= sequence->reserved_tokens);
  sequence->reserved_tokens -= num_tokens;
  const int64_t page_tokens = config_.page_tokens;
  for (size_t g = 0; g < num_groups() && num_tokens > 0; ++g) {
    BlockTable& table = sequence->groups[g].table;
    const int64_t end = table.next_slot() + num_tokens;
    for (int64_t i = table.next_slot() / page_tokens; i * page_tokens < end;
         ++i) {
      const int64_t filled = std::min(end - i * page_tokens, page_tokens);
      pool(g).SetFilledSlots(table.page(i), static_cast<int32_t>(filled));
    }
    table.Advance(num_tokens);
  }
}

void SequenceTables::CopySidePages(const SequenceState& sequence,
                                   const TailPages& to) {
  for (size_t g = 0; g < num_groups(); ++g) {
    for (size_t i = 0; i < to[g].size(); ++i) {
      CopyPage(g, sequence.groups[g].side_pages[i].page(), to[g][i]);
    }
  }
}

void SequenceTables::ReleaseOutsideWindows(SequenceState* sequence) {
  for (size_t g = 0; g < num_groups(); ++g) {
    const int64_t window = config_.groups[g].sliding_window;
    if (window == 0) continue;
    BlockTable& table = sequence->groups[g].table;
    counts_.pages_window_released +=
        table.ReleaseFront(FirstVisibleToken(window, table.logical_tokens()) /
                           config_.page_tokens);
  }
}

void SequenceTables::Evict(SequenceId id, SequenceState* sequence) {
  KVASIR_CHECK(sequence->reserved_tokens == 0);
  const int64_t page_tokens = config_.page_tokens;
  for (size_t g = 0; g < num_groups(); ++g) {
    GroupState& state = sequence->groups[g];
    if (!state.EvictionDue()) continue;
    const int64_t slots = state.table.next_slot();
    const int64_t kept = state.eviction.kept_slots();
    kvasir::v1::SlotEviction& eviction = evictions_.emplace_back();
    eviction.set_sequence_id(static_cast<uint64_t>(id.value()));
    eviction.set_page_group(static_cast<uint32_t>(g));
    eviction.set_after_page_copies(static_cast<uint32_t>(copies_.size()));
    for (int64_t i = 0; i * page_tokens < slots; ++i) {
      eviction.add_pages(state.table.page(i).value());
    }
    eviction.set_num_slots(static_cast<uint64_t>(slots));
    eviction.set_kept_slots(static_cast<uint64_t>(kept));
    eviction.set_logical_tokens(
        static_cast<uint64_t>(state.table.logical_tokens()));
    ++counts_.evictions;
    counts_.slots_evicted += slots - kept;
    counts_.pages_reclaimed += state.table.Compact(kept);
    if (kept % page_tokens == 0) continue;
    pool(g).SetFilledSlots(state.table.page(kept / page_tokens),
                           static_cast<int32_t>(kept % page_tokens));
  }
}

// ---------------------------------------------------------------------------
// Forking
// ---------------------------------------------------------------------------

bool SequenceTables::CanFork(const SequenceState& parent) const {
  for (size_t g = 0; g < num_groups(); ++g) {
    const GroupState& state = parent.groups[g];
    int64_t copies = static_cast<int64_t>(state.side_pages.size());
    if (config_.groups[g].eviction.evicts()) {
      copies += (state.table.next_slot() + config_.page_tokens - 1) /
                config_.page_tokens;
    }
    if (copies > pool(g).available_pages()) return false;
  }
  return true;
}

void SequenceTables::Fork(const SequenceState& parent, SequenceState* child) {
  for (size_t g = 0; g < num_groups(); ++g) {
    if (config_.groups[g].eviction.evicts()) {
      CopyPages(parent.groups[g], g, &child->groups[g]);
    } else {
      ForkPages(parent.groups[g], g, &child->groups[g]);
    }
  }
  ForkSidePages(parent, child);
}

void SequenceTables::ForkPages(const GroupState& from, size_t group,
                               GroupState* to) {
  const int64_t full = from.table.next_slot() / config_.page_tokens;
  to->table.AppendReleased(from.table.first_live());
  for (int64_t i = from.table.first_live(); i < full; ++i) {
    to->table.Append(pool(group).Share(from.table.page(i)));
  }
  to->table.SetLengthsOf(from.table);
  if (from.table.next_slot() % config_.page_tokens == 0) return;
  const PageId last =
      from.fork_page ? from.fork_page.page() : from.table.page(full);
  to->fork_page = pool(group).Share(last);
}

void SequenceTables::CopyPages(const GroupState& from, size_t group,
                               GroupState* to) {
  to->eviction = from.eviction;
  for (int64_t i = 0; i * config_.page_tokens < from.table.next_slot(); ++i) {
    PagePin page = cache_.Allocate(group);
    CopyPage(group, from.table.page(i), page.page());
    pool(group).SetFilledSlots(page.page(),
                               pool(group).filled_slots(from.table.page(i)));
    to->table.Append(std::move(page));
  }
  to->table.SetLengthsOf(from.table);
}

// Copies the side pages for the child at once, because the parent may overwrite
// their rows in the next step, before the child runs.
void SequenceTables::ForkSidePages(const SequenceState& parent,
                                   SequenceState* child) {
  for (size_t g = 0; g < num_groups(); ++g) {
    const GroupState& from = parent.groups[g];
    GroupState& to = child->groups[g];
    for (const PagePin& page : from.tail_pages) {
      to.tail_pages.push_back(pool(g).Share(page.page()));
    }
    for (const PagePin& page : from.side_pages) {
      to.side_pages.push_back(cache_.Allocate(g));
      CopyPage(g, page.page(), to.side_pages.back().page());
    }
  }
}

// ---------------------------------------------------------------------------
// For the executor
// ---------------------------------------------------------------------------

void SequenceTables::TakeDeltas(SequenceState* sequence,
                                kvasir::v1::SequenceStep* out,
                                int64_t written_before) {
  KVASIR_CHECK(written_before == 0 ||
               (!config_.has_side_pages() &&
                written_before < sequence->reserved_tokens));
  for (size_t g = 0; g < num_groups(); ++g) {
    GroupState& state = sequence->groups[g];
    counts_.table_entries_sent +=
        state.table.TakeDelta(GroupIdOf(g), out->mutable_block_tables());
    out->add_physical_starts(
        static_cast<uint64_t>(state.table.next_slot() + written_before));
    if (observes_) {
      const int64_t begin = state.table.logical_tokens();
      out->add_first_counted(static_cast<uint64_t>(state.eviction.FirstCounted(
          begin + written_before, begin + sequence->reserved_tokens)));
    }
    if (state.side_pages.empty() || state.side_pages_sent) continue;
    // The side pages are sent in the delta of the block table. This delta
    // exists, because the first reservation allocates the side pages and also
    // makes the table.
    kvasir::v1::BlockTableDelta* delta =
        out->mutable_block_tables(out->block_tables_size() - 1);
    for (const PagePin& page : state.side_pages) {
      delta->add_side_pages(page.page().value());
    }
    state.side_pages_sent = true;
  }
}

void SequenceTables::TakeEvictions(
    google::protobuf::RepeatedPtrField<kvasir::v1::SlotEviction>* out) {
  for (kvasir::v1::SlotEviction& eviction : evictions_) {
    *out->Add() = std::move(eviction);
  }
  evictions_.clear();
}

int64_t SequenceTables::AvailablePages(const SequenceState& sequence,
                                       size_t group) const {
  const int64_t own =
      HoldsUnsharedTail(sequence)
          ? static_cast<int64_t>(sequence.groups[group].tail_pages.size())
          : 0;
  return pool(group).available_pages() + own;
}

int64_t SequenceTables::PagesFreedByRelease(
    const SequenceState& sequence) const {
  int64_t freed = 0;
  for (size_t g = 0; g < num_groups(); ++g) {
    sequence.groups[g].ForEachPage(
        [&](PageId page) { freed += pool(g).references(page) == 1 ? 1 : 0; });
  }
  return freed;
}

int64_t SequenceTables::SharedTokens(const SequenceState& sequence) const {
  const BlockTable& table = sequence.groups[0].table;
  const int64_t full = table.next_slot() / config_.page_tokens;
  int64_t pages = 0;
  for (int64_t i = table.first_live(); i < full; ++i) {
    pages += pool(0).references(table.page(i)) > 1 ? 1 : 0;
  }
  return pages * config_.page_tokens;
}

}  // namespace kvasir::cache
