// KvCache: side pages and the tails that are copies of them.
#include <utility>

#include "base/check.h"
#include "cache/kv_cache.h"
#include "cache/kv_cache_sequence.h"

namespace kvasir::cache {

int64_t KvCache::tail_cut(SequenceId id) const {
  const Sequence& of = sequence(id);
  return of.chain ? of.tails.cut_tokens() : 0;
}

int64_t KvCache::available_pages(SequenceId id, PageGroupId group) const {
  const Sequence& of = sequence(id);
  const auto g = static_cast<size_t>(group.value());
  const int64_t own = HoldsTailAlone(of)
                          ? static_cast<int64_t>(of.groups[g].tail_pages.size())
                          : 0;
  return available_pages(group) + own;
}

bool KvCache::can_fork(SequenceId parent) const {
  const Sequence& of = sequence(parent);
  for (size_t g = 0; g < pools_.size(); ++g) {
    const GroupState& state = of.groups[g];
    int64_t copies = static_cast<int64_t>(state.side_pages.size());
    if (config_.groups[g].eviction.evicts()) {
      copies += (state.table.next_slot() + config_.page_tokens - 1) /
                config_.page_tokens;
    }
    if (copies > pools_[g]->available_pages()) return false;
  }
  return true;
}

kvasir::v1::PageCopy& KvCache::ListCopy(size_t group, PageId from, PageId to) {
  kvasir::v1::PageCopy& copy = pending_copies_.emplace_back();
  copy.set_page_group(static_cast<uint32_t>(group));
  copy.set_from_page(from.value());
  copy.set_to_page(to.value());
  return copy;
}

void KvCache::CopyPage(size_t group, PageId from, PageId to) {
  ListCopy(group, from, to);
  ++counts_.pages_copied;
}

// ---------------------------------------------------------------------------
// Tails that a start found
// ---------------------------------------------------------------------------

void KvCache::HoldTail(PrefixNodeId node, Sequence& out) {
  const TailPages& tail = index_->tail(node);
  for (size_t g = 0; g < pools_.size(); ++g) {
    for (const PageId page : tail[g]) {
      out.groups[g].tail_pages.push_back(pools_[g]->Share(page));
    }
  }
  index_->KeepTail(node);
}

bool KvCache::HoldsTailAlone(const Sequence& of) const {
  bool any = false;
  for (size_t g = 0; g < pools_.size(); ++g) {
    for (const PagePin& page : of.groups[g].tail_pages) {
      if (pools_[g]->references(page.page()) > 1) return false;
      any = true;
    }
  }
  return any;
}

// With no pages to copy the tail into: its own, which nobody else holds.
void KvCache::TakeOverTail(Sequence& of) {
  for (size_t g = 0; g < pools_.size(); ++g) {
    GroupState& state = of.groups[g];
    for (const PagePin& page : state.tail_pages) {
      const int32_t tag = pools_[g]->tag(page.page());
      if (tag >= 0)
        counts_.pages_evicted += index_->DropTail(PrefixNodeId(tag));
    }
    KVASIR_CHECK(state.side_pages.empty());
    state.side_pages = std::exchange(state.tail_pages, {});
  }
}

void KvCache::AllocateSidePages(Sequence& of, size_t group) {
  GroupState& state = of.groups[group];
  const int64_t side_pages = config_.groups[group].side_pages_per_sequence;
  while (static_cast<int64_t>(state.side_pages.size()) < side_pages) {
    state.side_pages.push_back(AllocatePage(group_id(group)));
  }
  // Copies come before everything that the step writes, so that the tail's
  // pages may be taken for something else as soon as the copies are listed.
  for (size_t i = 0; i < state.tail_pages.size(); ++i) {
    CopyPage(group, state.tail_pages[i].page(), state.side_pages[i].page());
  }
  state.tail_pages.clear();
}

// The parent may write over its rows in the very next step, the child may run
// later: it takes its copy now.
void KvCache::ForkSidePages(const Sequence& parent, Sequence& child) {
  for (size_t g = 0; g < pools_.size(); ++g) {
    const GroupState& from = parent.groups[g];
    GroupState& to = child.groups[g];
    for (const PagePin& page : from.tail_pages) {
      to.tail_pages.push_back(pools_[g]->Share(page.page()));
    }
    for (const PagePin& page : from.side_pages) {
      to.side_pages.push_back(AllocatePage(group_id(g)));
      CopyPage(g, page.page(), to.side_pages.back().page());
    }
  }
}

// ---------------------------------------------------------------------------
// Publishing
// ---------------------------------------------------------------------------

// Nothing has been written behind what was just committed, and all copies of
// the next step come before its writes: they read exactly this boundary's rows.
void KvCache::PublishTail(Sequence& of) {
  if (!has_side_pages_ || !of.chain) return;
  const TailKind kind = of.tails.At(of.groups[0].table.logical_tokens());
  if (kind == TailKind::kNone) return;
  const PrefixNodeId node = of.chain.node();
  const bool gives_way = kind == TailKind::kGivesWay;
  if (!index_->has_tail(node)) {
    if (!MakeRoomForTail(of)) return;
    std::vector<std::vector<PagePin>> pins = AllocateTail();
    // What was evicted for it may have been a page of the node itself.
    for (size_t g = 0; g < pools_.size(); ++g) {
      if (!index_->page(node, group_id(g)).valid()) return;
    }
    TailPages pages(pools_.size());
    for (size_t g = 0; g < pools_.size(); ++g) {
      for (size_t i = 0; i < pins[g].size(); ++i) {
        pages[g].push_back(pins[g][i].page());
        CopyPage(g, of.groups[g].side_pages[i].page(), pages[g].back());
      }
    }
    index_->PublishTail(node, std::move(pages), gives_way);
    ++counts_.tails_published;
  } else {
    // Another sequence's is there already.
    if (!gives_way) index_->KeepTail(node);
    if (of.tail_that_gives_way) {
      index_->DropTailThatGivesWay(of.tail_that_gives_way.node());
    }
  }
  of.tail_that_gives_way = gives_way ? index_->Ref(node) : PrefixRef();
}

// False when too few pages can be had. The sequence's last one that gives way
// goes, and the oldest, as far as tails take too much.
bool KvCache::MakeRoomForTail(Sequence& of) {
  for (size_t g = 0; g < pools_.size(); ++g) {
    if (config_.groups[g].side_pages_per_sequence >
        pools_[g]->available_pages()) {
      return false;
    }
  }
  if (of.tail_that_gives_way) {
    index_->DropTailThatGivesWay(of.tail_that_gives_way.node());
    of.tail_that_gives_way.Reset();
  }
  for (size_t g = 0; g < pools_.size(); ++g) {
    const int64_t more = config_.groups[g].side_pages_per_sequence;
    const int64_t most = MaxTailPages(pools_[g]->num_pages(), more);
    while (index_->tail_pages(group_id(g)) + more > most) {
      counts_.pages_evicted += index_->DropOldestTail();
    }
  }
  return true;
}

std::vector<std::vector<PagePin>> KvCache::AllocateTail() {
  std::vector<std::vector<PagePin>> pins(pools_.size());
  for (size_t g = 0; g < pools_.size(); ++g) {
    for (int64_t i = config_.groups[g].side_pages_per_sequence; i > 0; --i) {
      pins[g].push_back(AllocatePage(group_id(g)));
    }
  }
  return pins;
}

}  // namespace kvasir::cache
