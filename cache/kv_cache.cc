#include "cache/kv_cache.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "cache/kv_cache_sequence.h"

namespace kvasir::cache {
namespace {

// Nodes beyond one per page: for roots, and for pages' ancestors that a window
// has left without pages.
constexpr int64_t kNodesPerPage = 2;
constexpr int64_t kExtraNodes = 64;

bool HasSidePages(const KvCacheConfig& config) {
  return std::any_of(config.groups.begin(), config.groups.end(),
                     [](const KvCacheConfig::Group& group) {
                       return group.side_pages_per_sequence > 0;
                     });
}

bool Observes(const KvCacheConfig& config) {
  return std::any_of(config.groups.begin(), config.groups.end(),
                     [](const KvCacheConfig::Group& group) {
                       return group.eviction.observation_window > 0;
                     });
}

std::unique_ptr<PrefixHasher> OrKeyedHash(std::unique_ptr<PrefixHasher> hasher,
                                          const std::string& cache_id) {
  return hasher != nullptr ? std::move(hasher) : MakePrefixHasher(cache_id);
}

}  // namespace

KvCacheConfig MakeKvCacheConfig(const PageLayout& layout,
                                const PageCounts& pages, std::string cache_id,
                                const PageCounts& host_pages) {
  KVASIR_CHECK(pages.size() == layout.page_groups().size());
  KVASIR_CHECK(host_pages.empty() || host_pages.size() == pages.size());
  KvCacheConfig config;
  config.page_tokens = layout.page_tokens();
  config.cache_id = std::move(cache_id);
  config.prefix_reuse = layout.prefix_reusable();
  for (const PageGroupLayout& group : layout.page_groups()) {
    const auto g = static_cast<size_t>(group.id.value());
    config.groups.push_back(
        {.num_pages = pages[g],
         .sliding_window = group.sliding_window,
         .side_pages_per_sequence = group.side_pages_per_sequence,
         .eviction = group.eviction,
         .page_bytes = group.page_bytes,
         .payload_bytes = group.payload_bytes,
         .side_payload_bytes = group.side_payload_bytes,
         .num_host_pages = host_pages.empty() ? 0 : host_pages[g]});
  }
  return config;
}

KvCache::KvCache(KvCacheConfig config, std::unique_ptr<PrefixHasher> hasher)
    : config_(std::move(config)),
      has_side_pages_(HasSidePages(config_)),
      observes_(Observes(config_)),
      hasher_(OrKeyedHash(std::move(hasher), config_.cache_id)) {
  KVASIR_CHECK(!config_.groups.empty() && config_.page_tokens >= 1);
  std::vector<PagePool*> pools;
  int64_t num_pages = 0;
  for (const KvCacheConfig::Group& group : config_.groups) {
    KVASIR_CHECK(group.num_pages >= 1);
    host_pools_.push_back(std::make_unique<PagePool>(group.num_host_pages));
    KVASIR_CHECK(!group.eviction.evicts() ||
                 (group.sliding_window == 0 && !config_.prefix_reuse));
    pools_.push_back(std::make_unique<PagePool>(group.num_pages));
    pools.push_back(pools_.back().get());
    num_pages += group.num_pages;
  }
  index_ = std::make_unique<PrefixIndex>(
      PrefixIndexOptions{.page_tokens = config_.page_tokens,
                         .max_nodes = kNodesPerPage * num_pages + kExtraNodes},
      std::move(pools));
}

KvCache::~KvCache() = default;

KvCache::Sequence& KvCache::sequence(SequenceId id) {
  const auto it = sequences_.find(id);
  KVASIR_CHECK(it != sequences_.end());
  return *it->second;
}

const KvCache::Sequence& KvCache::sequence(SequenceId id) const {
  const auto it = sequences_.find(id);
  KVASIR_CHECK(it != sequences_.end());
  return *it->second;
}

// ---------------------------------------------------------------------------
// Starting: what the index knows of a prompt
// ---------------------------------------------------------------------------

KvCache::Sequence& KvCache::AddSequence(SequenceId id) {
  const auto [it, is_new] =
      sequences_.try_emplace(id, std::make_unique<Sequence>(config_));
  KVASIR_CHECK(is_new);
  return *it->second;
}

KvCache::Hit KvCache::FindPrefix(absl::Span<const int32_t> token_ids,
                                 const StartOptions& options,
                                 int64_t* page_hashes) const {
  Hit hit;
  if (!config_.prefix_reuse || !options.reuse_prefix) return hit;
  PrefixNodeId node = index_->FindRoot(options.salt);
  if (!node.valid()) return hit;
  // One token at least is left to compute.
  const auto num_tokens = static_cast<int64_t>(token_ids.size());
  const int64_t most =
      std::max<int64_t>(0, num_tokens - 1) / config_.page_tokens;
  const auto page_tokens = static_cast<size_t>(config_.page_tokens);
  // By group: from which page on none is missing.
  std::vector<int64_t> held_from(pools_.size(), 0);
  int64_t num_found = 0;
  while (static_cast<int64_t>(hit.nodes.size()) < most) {
    const auto page =
        token_ids.subspan(hit.nodes.size() * page_tokens, page_tokens);
    ++*page_hashes;
    node = index_->FindChild(node, hasher_->Extend(index_->hash(node), page),
                             page);
    if (!node.valid()) break;
    hit.nodes.push_back(node);
    const auto num_pages = static_cast<int64_t>(hit.nodes.size());
    // A hit needs, in every group, the pages that the next token sees.
    bool held = true;
    for (size_t g = 0; g < pools_.size(); ++g) {
      if (!index_->page(node, group_id(g)).valid()) held_from[g] = num_pages;
      held = held && held_from[g] <= FirstVisiblePage(g, num_pages);
    }
    if (!held) continue;
    hit.num_pages = num_pages;
    // And where sequences have side pages, a tail.
    if (!has_side_pages_ || index_->has_tail(node)) num_found = num_pages;
  }
  hit.nodes.resize(static_cast<size_t>(num_found));
  return hit;
}

int64_t KvCache::FirstVisiblePage(size_t group, int64_t num_pages) const {
  return FirstVisibleToken(config_.groups[group].sliding_window,
                           num_pages * config_.page_tokens) /
         config_.page_tokens;
}

void KvCache::TakePrefix(const Hit& hit, Sequence& out) {
  const auto num_pages = static_cast<int64_t>(hit.nodes.size());
  const int64_t tokens = num_pages * config_.page_tokens;
  for (size_t g = 0; g < pools_.size(); ++g) {
    BlockTable& table = out.groups[g].table;
    const int64_t first = FirstVisiblePage(g, num_pages);
    table.AppendReleased(first);
    for (int64_t i = first; i < num_pages; ++i) {
      const PageId page =
          index_->page(hit.nodes[static_cast<size_t>(i)], group_id(g));
      table.Append(pools_[g]->Share(page));
    }
    table.SetFound(tokens);
  }
  if (num_pages == 0) return;
  if (out.chain) out.chain = index_->Ref(hit.nodes.back());
  if (has_side_pages_) HoldTail(hit.nodes.back(), out);
}

StartResult KvCache::StartSequence(SequenceId id,
                                   absl::Span<const int32_t> token_ids,
                                   const StartOptions& options) {
  Sequence& added = AddSequence(id);
  for (size_t g = 0; g < pools_.size(); ++g) {
    added.groups[g].eviction = ScheduleOf(g, token_ids, options);
  }
  const Hit hit = FindPrefix(token_ids, options, &counts_.page_hashes);
  added.publishes = config_.prefix_reuse && options.publish_prefix;
  if (added.publishes) {
    // A salt without a root has no hit that an eviction could take away.
    const PrefixHash root = hasher_->Root(options.salt);
    do {
      added.chain = index_->TakeRoot(options.salt, root);
    } while (!added.chain && EvictForIndex());
  }
  TakePrefix(hit, added);
  const int64_t cached_tokens =
      static_cast<int64_t>(hit.nodes.size()) * config_.page_tokens;
  if (added.publishes && has_side_pages_) {
    added.tails =
        TailPolicy({.page_tokens = config_.page_tokens,
                    .num_tokens = static_cast<int64_t>(token_ids.size()),
                    .paged_tokens = hit.num_pages * config_.page_tokens,
                    .found_tokens = cached_tokens});
  }
  if (config_.prefix_reuse && options.reuse_prefix) {
    added.uncounted_query_tokens = static_cast<int64_t>(token_ids.size());
    added.uncounted_hit_tokens = cached_tokens;
  }
  return {cached_tokens};
}

int64_t KvCache::CachedPrefixTokens(absl::Span<const int32_t> token_ids,
                                    const StartOptions& options) const {
  int64_t page_hashes = 0;  // a question is not a query
  const Hit hit = FindPrefix(token_ids, options, &page_hashes);
  return static_cast<int64_t>(hit.nodes.size()) * config_.page_tokens;
}

// ---------------------------------------------------------------------------
// Reserving: pages for the tokens of a step
// ---------------------------------------------------------------------------

int64_t KvCache::MissingPages(const Sequence& of, size_t group,
                              int64_t new_tokens) const {
  const GroupState& state = of.groups[group];
  const int64_t side_pages = config_.groups[group].side_pages_per_sequence -
                             static_cast<int64_t>(state.side_pages.size());
  return state.table.MissingEntries(new_tokens) + side_pages;
}

ReserveResult KvCache::Reserve(SequenceId id, int64_t new_tokens) {
  KVASIR_CHECK(new_tokens >= 1 && !eviction_due(id));
  Sequence& of = sequence(id);
  const std::optional<int64_t> next = next_eviction(id);
  KVASIR_CHECK(!next || logical_tokens(id) + new_tokens <= *next);
  const bool has_tail_alone = HoldsTailAlone(of);
  bool takes_tail = false;
  for (size_t g = 0; g < pools_.size(); ++g) {
    const int64_t want = MissingPages(of, g, new_tokens);
    const int64_t have = pools_[g]->available_pages();
    if (want <= have) continue;
    if (want == have + 1 && of.groups[g].CanTakeOver(*pools_[g])) continue;
    const auto tail = static_cast<int64_t>(of.groups[g].tail_pages.size());
    if (has_tail_alone && want - tail <= have) {
      takes_tail = true;
      continue;
    }
    const BlockTable& table = of.groups[g].table;
    const int64_t entries =
        table.num_entries() + have + table.MissingEntries(new_tokens) - want;
    return {.ok = false,
            .group = group_id(g),
            .want_pages = want,
            .free_pages = have,
            .fits_tokens = entries * config_.page_tokens - table.next_slot()};
  }
  if (takes_tail) TakeOverTail(of);
  for (size_t g = 0; g < pools_.size(); ++g) {
    AllocateMissing(of, g, new_tokens);
  }
  of.reserved_tokens = new_tokens;
  return {.ok = true};
}

void KvCache::AllocateMissing(Sequence& of, size_t group, int64_t new_tokens) {
  GroupState& state = of.groups[group];
  const PageGroupId id = group_id(group);
  if (MissingPages(of, group, new_tokens) > pools_[group]->available_pages()) {
    KVASIR_CHECK(TakeOverForkPage(of, group));
  }
  AllocateSidePages(of, group);
  for (int64_t n = state.table.MissingEntries(new_tokens); n > 0; --n) {
    PagePin page = AllocatePage(id);
    if (state.fork_page) {
      CopyPage(group, state.fork_page.page(), page.page());
      pools_[group]->SetFilledSlots(
          page.page(),
          static_cast<int32_t>(state.table.next_slot() % config_.page_tokens));
      state.fork_page.Reset();
    }
    state.table.Append(std::move(page));
  }
}

// With no page to copy into: the page itself, which nobody else holds.
bool KvCache::TakeOverForkPage(Sequence& of, size_t group) {
  GroupState& state = of.groups[group];
  if (!state.CanTakeOver(*pools_[group])) return false;
  const PageId page = state.fork_page.page();
  // The parent may have filled and published it before it went.
  if (pools_[group]->tag(page) >= 0) index_->Forget(group_id(group), page);
  const int64_t filled = state.table.next_slot() % config_.page_tokens;
  pools_[group]->SetFilledSlots(page, static_cast<int32_t>(filled));
  state.table.Append(std::move(state.fork_page));
  return true;
}

PagePin KvCache::AllocatePage(PageGroupId group) {
  if (pool(group).free_pages() == 0) {
    const int64_t evicted = index_->EvictOldest(group);
    KVASIR_CHECK(evicted > 0);
    counts_.pages_evicted += evicted;
  }
  ++counts_.pages_allocated;
  return *pool(group).Allocate();
}

// ---------------------------------------------------------------------------
// Committing: what the step wrote
// ---------------------------------------------------------------------------

void KvCache::Commit(SequenceId id, absl::Span<const int32_t> token_ids) {
  Sequence& of = sequence(id);
  const auto num_tokens = static_cast<int64_t>(token_ids.size());
  KVASIR_CHECK(num_tokens <= of.reserved_tokens);
  of.reserved_tokens -= num_tokens;
  counts_.query_tokens += std::exchange(of.uncounted_query_tokens, 0);
  counts_.hit_tokens += std::exchange(of.uncounted_hit_tokens, 0);
  FillPages(of, num_tokens);
  for (GroupState& state : of.groups) state.table.Advance(num_tokens);
  PublishFullPages(of, token_ids);
  // An empty step changed no side page, and left none where nothing was yet.
  if (num_tokens > 0) PublishTail(of);
  ReleaseBehindWindows(of);
}

void KvCache::FillPages(Sequence& of, int64_t new_tokens) {
  if (new_tokens == 0) return;
  const int64_t page_tokens = config_.page_tokens;
  for (size_t g = 0; g < pools_.size(); ++g) {
    const BlockTable& table = of.groups[g].table;
    const int64_t end = table.next_slot() + new_tokens;
    for (int64_t i = table.next_slot() / page_tokens; i * page_tokens < end;
         ++i) {
      const int64_t filled = std::min(end - i * page_tokens, page_tokens);
      pools_[g]->SetFilledSlots(table.page(i), static_cast<int32_t>(filled));
    }
  }
}

void KvCache::PublishFullPages(Sequence& of,
                               absl::Span<const int32_t> token_ids) {
  if (!of.publishes) return;
  const auto page_tokens = static_cast<size_t>(config_.page_tokens);
  int64_t index = (of.groups[0].table.logical_tokens() -
                   static_cast<int64_t>(token_ids.size())) /
                  config_.page_tokens;
  for (int32_t token : token_ids) {
    of.page_token_ids.push_back(token);
    if (of.page_token_ids.size() < page_tokens) continue;
    PublishPage(of, index++);
    of.page_token_ids.clear();
  }
}

void KvCache::PublishPage(Sequence& of, int64_t index) {
  if (of.chain) {
    for (size_t g = 0; g < pools_.size(); ++g) {
      of.pages_to_publish[g] = of.groups[g].table.page(index);
    }
    const PrefixNodeId parent = of.chain.node();
    ++counts_.page_hashes;
    const PrefixIndex::NewPage page = {
        .parent = parent,
        .hash = hasher_->Extend(index_->hash(parent), of.page_token_ids),
        .token_ids = of.page_token_ids,
        .pages = of.pages_to_publish};
    // Nodes of the sequence itself (its pages and the root) stay: where they
    // alone fill the index, an eviction would gain nothing.
    const bool can_gain = index + 2 <= index_->max_nodes();
    while (can_gain && index_->LacksRoomFor(page) && EvictForIndex()) {
    }
    of.chain = index_->Publish(page);
  }
  // Without its parent in the index a page can not be found.
  ++(of.chain ? counts_.pages_published : counts_.pages_unpublished);
}

// The last cached page of a long sequence keeps all its ancestors' nodes, long
// after a window has taken their pages: makes room for another's by forgetting
// the oldest page of each group. False when none is cached.
bool KvCache::EvictForIndex() {
  bool evicted = false;
  for (size_t g = 0; g < pools_.size(); ++g) {
    const int64_t pages = index_->EvictOldest(group_id(g));
    counts_.pages_evicted += pages;
    evicted = evicted || pages > 0;
  }
  return evicted;
}

void KvCache::ReleaseBehindWindows(Sequence& of) {
  for (size_t g = 0; g < pools_.size(); ++g) {
    const int64_t window = config_.groups[g].sliding_window;
    if (window == 0) continue;
    BlockTable& table = of.groups[g].table;
    counts_.pages_window_released +=
        table.ReleaseFront(FirstVisibleToken(window, table.logical_tokens()) /
                           config_.page_tokens);
  }
}

// ---------------------------------------------------------------------------
// What the executor is told
// ---------------------------------------------------------------------------

void KvCache::TakeDeltas(SequenceId id, kvasir::v1::SequenceStep* out,
                         int64_t written_before) {
  Sequence& of = sequence(id);
  KVASIR_CHECK(written_before == 0 ||
               (can_run_ahead() && written_before < of.reserved_tokens));
  for (size_t g = 0; g < pools_.size(); ++g) {
    GroupState& state = of.groups[g];
    counts_.table_entries_sent +=
        state.table.TakeDelta(group_id(g), out->mutable_block_tables());
    out->add_physical_starts(
        static_cast<uint64_t>(state.table.next_slot() + written_before));
    if (observes_) {
      const int64_t begin = state.table.logical_tokens();
      out->add_first_counted(static_cast<uint64_t>(state.eviction.FirstCounted(
          begin + written_before, begin + of.reserved_tokens)));
    }
    if (state.side_pages.empty() || state.side_pages_sent) continue;
    // Side pages come with the first reservation, and so with a new table.
    kvasir::v1::BlockTableDelta* delta =
        out->mutable_block_tables(out->block_tables_size() - 1);
    for (const PagePin& page : state.side_pages) {
      delta->add_side_pages(page.page().value());
    }
    state.side_pages_sent = true;
  }
}

void KvCache::TakePageCopies(
    google::protobuf::RepeatedPtrField<kvasir::v1::PageCopy>* out) {
  for (kvasir::v1::PageCopy& copy : pending_copies_) {
    *out->Add() = std::move(copy);
  }
  pending_copies_.clear();
}

// ---------------------------------------------------------------------------
// Forking and ending
// ---------------------------------------------------------------------------

void KvCache::Fork(SequenceId parent_id, SequenceId child_id) {
  Sequence& child = AddSequence(child_id);
  Sequence& parent = sequence(parent_id);
  KVASIR_CHECK(parent.reserved_tokens == 0 && can_fork(parent_id));
  child.publishes = parent.publishes;
  child.tails = parent.tails;
  child.page_token_ids = parent.page_token_ids;
  if (parent.chain) child.chain = index_->Ref(parent.chain.node());
  for (size_t g = 0; g < pools_.size(); ++g) {
    if (config_.groups[g].eviction.evicts()) {
      CopyPages(parent, g, child);
    } else {
      ForkPages(parent, g, child);
    }
  }
  ForkSidePages(parent, child);
  ++counts_.forks;
}

void KvCache::ForkPages(const Sequence& parent, size_t group, Sequence& child) {
  const GroupState& from = parent.groups[group];
  GroupState& to = child.groups[group];
  const int64_t full = from.table.next_slot() / config_.page_tokens;
  to.table.AppendReleased(from.table.first_live());
  for (int64_t i = from.table.first_live(); i < full; ++i) {
    to.table.Append(pools_[group]->Share(from.table.page(i)));
  }
  to.table.SetLengthsOf(from.table);
  if (from.table.next_slot() % config_.page_tokens == 0) return;
  const PageId last =
      from.fork_page ? from.fork_page.page() : from.table.page(full);
  to.fork_page = pools_[group]->Share(last);
}

void KvCache::Release(SequenceId id) {
  const auto it = sequences_.find(id);
  KVASIR_CHECK(it != sequences_.end());
  // Copies into its pages stay listed: later ones may read them, and whoever
  // takes such a page writes behind all copies.
  const PrefixRef chain = std::move(it->second->chain);
  sequences_.erase(it);
  // Behind its pages of tokens: tails go with these and not before them.
  if (has_side_pages_ && chain) index_->WarmTails(chain.node());
}

void KvCache::Preempt(SequenceId id) {
  Release(id);
  ++counts_.preemptions;
}

void KvCache::DropPrefixCache() {
  for (size_t g = 0; g < pools_.size(); ++g) {
    while (index_->EvictOldest(group_id(g)) > 0) {
    }
  }
}

// ---------------------------------------------------------------------------
// Questions
// ---------------------------------------------------------------------------

int64_t KvCache::logical_tokens(SequenceId id) const {
  return sequence(id).groups[0].table.logical_tokens();
}

int64_t KvCache::reserved_tokens(SequenceId id) const {
  return sequence(id).reserved_tokens;
}

int64_t KvCache::physical_tokens(SequenceId id, PageGroupId group) const {
  return sequence(id)
      .groups[static_cast<size_t>(group.value())]
      .table.physical_tokens();
}

int64_t KvCache::PagesFreedByRelease(SequenceId id) const {
  const Sequence& of = sequence(id);
  int64_t freed = 0;
  for (size_t g = 0; g < pools_.size(); ++g) {
    of.groups[g].ForEachPage([&](PageId page) {
      freed += pools_[g]->references(page) == 1 ? 1 : 0;
    });
  }
  return freed;
}

std::vector<PageId> KvCache::Pages(SequenceId id, PageGroupId group) const {
  const BlockTable& table =
      sequence(id).groups[static_cast<size_t>(group.value())].table;
  std::vector<PageId> pages;
  for (int64_t i = table.first_live(); i < table.num_entries(); ++i) {
    pages.push_back(table.page(i));
  }
  return pages;
}

std::vector<PageId> KvCache::SidePages(SequenceId id, PageGroupId group) const {
  std::vector<PageId> pages;
  for (const PagePin& page :
       sequence(id).groups[static_cast<size_t>(group.value())].side_pages) {
    pages.push_back(page.page());
  }
  return pages;
}

SequencePages KvCache::sequence_pages(PageGroupId group) const {
  const KvCacheConfig::Group& config =
      config_.groups[static_cast<size_t>(group.value())];
  return {.page_tokens = config_.page_tokens,
          .side_pages = config.side_pages_per_sequence,
          .sliding_window = config.sliding_window,
          .eviction = config.eviction};
}

}  // namespace kvasir::cache
