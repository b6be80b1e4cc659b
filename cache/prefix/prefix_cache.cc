#include "cache/prefix/prefix_cache.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace kvasir::cache {
namespace {

// The index may have kNodesPerPage nodes for each page of the pools, and
// kExtraNodes more. It needs more nodes than pages, because it has roots and
// keeps ancestors whose pages a window has given up.
constexpr int64_t kNodesPerPage = 2;
constexpr int64_t kExtraNodes = 64;

}  // namespace

PrefixCache::PrefixCache(const KvCacheConfig& config,
                         std::unique_ptr<PrefixHasher> hasher,
                         KvCacheStats* counts)
    : config_(config),
      has_side_pages_(config.has_side_pages()),
      hasher_(hasher != nullptr ? std::move(hasher)
                                : MakePrefixHasher(config.cache_id)),
      pages_to_publish_(config.groups.size()),
      counts_(*counts) {
  std::vector<PagePool*> pools;
  int64_t num_pages = 0;
  for (const KvCacheConfig::Group& group : config_.groups) {
    pools_.push_back(std::make_unique<PagePool>(group.num_pages));
    pools.push_back(pools_.back().get());
    num_pages += group.num_pages;
  }
  index_ = std::make_unique<PrefixIndex>(
      PrefixIndexOptions{.page_tokens = config_.page_tokens,
                         .max_nodes = kNodesPerPage * num_pages + kExtraNodes},
      std::move(pools));
}

PagePin PrefixCache::Allocate(size_t group) {
  PagePool& pages = pool(group);
  if (pages.free_pages() == 0) {
    const int64_t evicted = index_->EvictOldest(GroupIdOf(group));
    KVASIR_CHECK(evicted > 0);
    counts_.pages_evicted += evicted;
  }
  ++counts_.pages_allocated;
  return *pages.Allocate();
}

void PrefixCache::DropAll() {
  for (size_t g = 0; g < pools_.size(); ++g) {
    while (index_->EvictOldest(GroupIdOf(g)) > 0) {
    }
  }
}

PrefixHit PrefixCache::Find(absl::Span<const int32_t> token_ids,
                            const StartOptions& options,
                            int64_t* page_hashes) const {
  PrefixHit hit;
  if (!config_.prefix_reuse || !options.reuse_prefix) return hit;
  PrefixNodeId node = index_->FindRoot(options.salt);
  if (!node.valid()) return hit;
  // Leaves at least the last token to compute, because its logits are needed.
  const auto num_tokens = static_cast<int64_t>(token_ids.size());
  const int64_t most =
      std::max<int64_t>(0, num_tokens - 1) / config_.page_tokens;
  const auto page_tokens = static_cast<size_t>(config_.page_tokens);
  // For each group, the index from which on the group has all pages so far.
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
    // In every group, a hit needs all pages that the next token attends to.
    bool held = true;
    for (size_t g = 0; g < pools_.size(); ++g) {
      if (!this->page(node, g).valid()) held_from[g] = num_pages;
      held = held && held_from[g] <= FirstVisiblePage(g, num_pages);
    }
    if (!held) continue;
    hit.num_pages = num_pages;
    // If sequences have side pages, a hit needs a tail as well.
    if (!has_side_pages_ || index_->has_tail(node)) num_found = num_pages;
  }
  hit.nodes.resize(static_cast<size_t>(num_found));
  return hit;
}

std::vector<PrefixNodeId> PrefixCache::FindPages(
    absl::Span<const int32_t> token_ids, const StartOptions& options) const {
  std::vector<PrefixNodeId> found;
  if (!config_.prefix_reuse || !options.reuse_prefix) return found;
  const auto page_tokens = static_cast<size_t>(config_.page_tokens);
  PrefixNodeId node = index_->FindRoot(options.salt);
  for (size_t at = 0; at + page_tokens <= token_ids.size() && node.valid();
       at += page_tokens) {
    const auto page = token_ids.subspan(at, page_tokens);
    node = index_->FindChild(node, hasher_->Extend(index_->hash(node), page),
                             page);
    if (node.valid()) found.push_back(node);
  }
  return found;
}

int64_t PrefixCache::FirstVisiblePage(size_t group, int64_t num_pages) const {
  return FirstVisibleToken(config_.groups[group].sliding_window,
                           num_pages * config_.page_tokens) /
         config_.page_tokens;
}

void PrefixCache::StartChain(const StartOptions& options, PrefixChain* out) {
  out->publishes = config_.prefix_reuse && options.publish_prefix;
  if (!out->publishes) return;
  // If there is no room for a new root, cached pages are evicted. They cannot
  // be pages that this sequence has found: its salt has no root yet.
  const PrefixHash root = hasher_->Root(options.salt);
  do {
    out->chain = index_->TakeRoot(options.salt, root);
  } while (!out->chain && EvictForIndex());
}

PrefixChain PrefixCache::Fork(const PrefixChain& parent) {
  PrefixChain child;
  child.publishes = parent.publishes;
  child.tails = parent.tails;
  child.page_token_ids = parent.page_token_ids;
  if (parent.chain) child.chain = index_->Ref(parent.chain.node());
  return child;
}

void PrefixCache::PublishPage(int64_t index, PrefixChain* sequence) {
  if (sequence->chain) {
    const PrefixNodeId parent = sequence->chain.node();
    ++counts_.page_hashes;
    const PrefixIndex::NewPage page = {
        .parent = parent,
        .hash = hasher_->Extend(index_->hash(parent), sequence->page_token_ids),
        .token_ids = sequence->page_token_ids,
        .pages = pages_to_publish_};
    // The root and the nodes of the sequence's own pages cannot be removed. If
    // they fill the index, an eviction would make no room.
    const bool can_gain = index + 2 <= index_->max_nodes();
    while (can_gain && index_->LacksRoomFor(page) && EvictForIndex()) {
    }
    sequence->chain = index_->Publish(page);
  }
  // The chain is empty if this page or an earlier one could not be published.
  // Later pages are then not published, because no prompt could find a page
  // whose parent is not in the index.
  ++(sequence->chain ? counts_.pages_published : counts_.pages_unpublished);
}

// Makes room for another index node by evicting the oldest cached page of each
// group. Nodes without pages may fill the index: the last cached page of a long
// sequence keeps the nodes of all its ancestors, even after a window has given
// up their pages. Returns false if no page is cached.
bool PrefixCache::EvictForIndex() {
  bool evicted = false;
  for (size_t g = 0; g < pools_.size(); ++g) {
    const int64_t pages = index_->EvictOldest(GroupIdOf(g));
    counts_.pages_evicted += pages;
    evicted = evicted || pages > 0;
  }
  return evicted;
}

// ---------------------------------------------------------------------------
// Tails
// ---------------------------------------------------------------------------

// The caller lists copies of the side pages into the tail. They read the state
// after exactly `logical_tokens`, because nothing has been written since, and
// the next step does all copies before it writes.
const TailPages* PrefixCache::PublishTail(int64_t logical_tokens,
                                          PrefixChain* sequence) {
  if (!has_side_pages_ || !sequence->chain) return nullptr;
  const TailKind kind = sequence->tails.At(logical_tokens);
  if (kind == TailKind::kNone) return nullptr;
  const PrefixNodeId node = sequence->chain.node();
  const bool gives_way = kind == TailKind::kGivesWay;
  const TailPages* published = nullptr;
  if (!index_->has_tail(node)) {
    if (!MakeRoomForTail(sequence)) return nullptr;
    const std::vector<std::vector<PagePin>> pins = AllocateTail();
    // A tail needs all pages of its node, but the allocation may have evicted
    // one of them.
    for (size_t g = 0; g < pools_.size(); ++g) {
      if (!page(node, g).valid()) return nullptr;
    }
    TailPages pages(pools_.size());
    for (size_t g = 0; g < pools_.size(); ++g) {
      for (const PagePin& pin : pins[g]) pages[g].push_back(pin.page());
    }
    index_->PublishTail(node, std::move(pages), gives_way);
    published = &index_->tail(node);
    ++counts_.tails_published;
  } else {
    // Another sequence has already published a tail here. That tail replaces
    // this sequence's own last tail, if that one gives way (kGivesWay).
    if (!gives_way) index_->KeepTail(node);
    if (sequence->tail_that_gives_way) {
      index_->DropTailThatGivesWay(sequence->tail_that_gives_way.node());
    }
  }
  sequence->tail_that_gives_way = gives_way ? index_->Ref(node) : PrefixRef();
  return published;
}

// Returns false, and drops nothing, if the pools have too few pages for a tail.
// Otherwise drops the sequence's tail that the new one replaces (kGivesWay),
// and then the oldest tails until the new one is within the limit.
bool PrefixCache::MakeRoomForTail(PrefixChain* sequence) {
  for (size_t g = 0; g < pools_.size(); ++g) {
    if (config_.groups[g].side_pages_per_sequence >
        pools_[g]->available_pages()) {
      return false;
    }
  }
  if (sequence->tail_that_gives_way) {
    index_->DropTailThatGivesWay(sequence->tail_that_gives_way.node());
    sequence->tail_that_gives_way.Reset();
  }
  for (size_t g = 0; g < pools_.size(); ++g) {
    const int64_t more = config_.groups[g].side_pages_per_sequence;
    const int64_t most = MaxTailPages(pools_[g]->num_pages(), more);
    while (index_->tail_pages(GroupIdOf(g)) + more > most) {
      counts_.pages_evicted += index_->DropOldestTail();
    }
  }
  return true;
}

std::vector<std::vector<PagePin>> PrefixCache::AllocateTail() {
  std::vector<std::vector<PagePin>> pins(pools_.size());
  for (size_t g = 0; g < pools_.size(); ++g) {
    for (int64_t i = config_.groups[g].side_pages_per_sequence; i > 0; --i) {
      pins[g].push_back(Allocate(g));
    }
  }
  return pins;
}

void PrefixCache::ForgetTailOf(size_t group, PageId page) {
  const int32_t tag = pool(group).tag(page);
  if (tag >= 0) counts_.pages_evicted += index_->DropTail(PrefixNodeId(tag));
}

void PrefixCache::WarmTails(const PrefixRef& chain) {
  if (has_side_pages_ && chain) index_->WarmTails(chain.node());
}

}  // namespace kvasir::cache
