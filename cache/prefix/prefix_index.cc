#include "cache/prefix/prefix_index.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace kvasir::cache {

void PrefixRef::Reset() {
  if (index_ == nullptr) return;
  std::exchange(index_, nullptr)->Unreference(node_);
}

PrefixIndex::PrefixIndex(const PrefixIndexOptions& options,
                         std::vector<PagePool*> pools)
    : options_(options),
      pools_(std::move(pools)),
      tail_pages_(pools_.size(), 0) {
  KVASIR_CHECK(options_.page_tokens >= 1 && options_.max_nodes >= 1);
}

PrefixNodeId PrefixIndex::FindRoot(absl::string_view salt) const {
  const auto it = roots_.find(salt);
  return it == roots_.end() ? PrefixNodeId() : it->second;
}

PrefixRef PrefixIndex::TakeRoot(absl::string_view salt,
                                const PrefixHash& hash) {
  PrefixNodeId root = FindRoot(salt);
  if (!root.valid()) {
    root = NewNode(PrefixNodeId(), hash);
    if (!root.valid()) return PrefixRef();
    roots_.emplace(salt, root);
    salts_.emplace(root, salt);
  }
  return Ref(root);
}

PrefixNodeId PrefixIndex::FindChild(PrefixNodeId parent, const PrefixHash& hash,
                                    absl::Span<const int32_t> token_ids) const {
  KVASIR_CHECK(static_cast<int64_t>(token_ids.size()) == options_.page_tokens);
  const auto it = by_hash_.find(hash);
  if (it == by_hash_.end()) return PrefixNodeId();
  const PrefixNodeId found = it->second;
  const bool same =
      node(found).parent == parent.value() &&
      std::equal(token_ids.begin(), token_ids.end(), tokens(found));
  return same ? found : PrefixNodeId();
}

PrefixRef PrefixIndex::Publish(const NewPage& page) {
  KVASIR_CHECK(page.pages.size() == pools_.size());
  PrefixNodeId child = FindChild(page.parent, page.hash, page.token_ids);
  if (!child.valid()) {
    // a hash collision: another node already has this hash
    if (by_hash_.contains(page.hash)) return PrefixRef();
    child = NewNode(page.parent, page.hash);
    if (!child.valid()) return PrefixRef();
    std::copy(page.token_ids.begin(), page.token_ids.end(), tokens(child));
    by_hash_.emplace(page.hash, child);
    ++node(page.parent).references;
  }
  for (size_t g = 0; g < pools_.size(); ++g) {
    PageId& slot = page_slot(child, PageGroupId(static_cast<int32_t>(g)));
    if (slot.valid() || !page.pages[g].valid()) continue;
    pools_[g]->SetTag(page.pages[g], child.value());
    slot = page.pages[g];
    ++node(child).num_pages;
  }
  return Ref(child);
}

PrefixRef PrefixIndex::Ref(PrefixNodeId id) {
  KVASIR_CHECK(id.valid() && node(id).in_use);
  ++node(id).references;
  return PrefixRef(this, id);
}

PageId PrefixIndex::page(PrefixNodeId id, PageGroupId group) const {
  return pages_[static_cast<size_t>(id.value()) * pools_.size() +
                static_cast<size_t>(group.value())];
}

const PrefixHash& PrefixIndex::hash(PrefixNodeId id) const {
  return node(id).hash;
}

int64_t PrefixIndex::EvictOldest(PageGroupId group) {
  const PageId oldest =
      pools_[static_cast<size_t>(group.value())]->oldest_cached();
  return oldest.valid() ? Forget(group, oldest) : 0;
}

int64_t PrefixIndex::Forget(PageGroupId group, PageId page) {
  PagePool& pool = *pools_[static_cast<size_t>(group.value())];
  const PrefixNodeId id(pool.tag(page));
  KVASIR_CHECK(id.valid());
  int64_t forgotten = DropTail(id);
  if (page_slot(id, group) != page) {
    KVASIR_CHECK(forgotten > 0);  // the dropped tail had at least this page
    return forgotten;
  }
  page_slot(id, group) = PageId();
  --node(id).num_pages;
  pool.ClearTag(page);
  Prune(id);
  return ++forgotten;
}

void PrefixIndex::PublishTail(PrefixNodeId id, TailPages pages,
                              bool gives_way) {
  KVASIR_CHECK(node(id).num_pages == static_cast<int32_t>(pools_.size()));
  KVASIR_CHECK(pages.size() == pools_.size() && !has_tail(id));
  for (size_t g = 0; g < pages.size(); ++g) {
    for (const PageId page : pages[g]) pools_[g]->SetTag(page, id.value());
    tail_pages_[g] += static_cast<int64_t>(pages[g].size());
  }
  tail_of_[id] =
      tails_.insert(tails_.end(), Tail{id, std::move(pages), gives_way});
}

void PrefixIndex::KeepTail(PrefixNodeId id) {
  const TailList::iterator tail = tail_of_.at(id);
  tail->gives_way = false;
  MakeNewest(tail);
}

void PrefixIndex::WarmTails(PrefixNodeId id) {
  for (; id.valid(); id = PrefixNodeId(node(id).parent)) {
    const auto found = tail_of_.find(id);
    if (found != tail_of_.end()) MakeNewest(found->second);
  }
}

void PrefixIndex::MakeNewest(TailList::iterator tail) {
  tails_.splice(tails_.end(), tails_, tail);
  for (size_t g = 0; g < pools_.size(); ++g) {
    // Share() takes a reference and its temporary pin drops it again. This
    // moves a cached page to the end of the eviction order.
    for (const PageId page : tail->pages[g]) pools_[g]->Share(page);
  }
}

int64_t PrefixIndex::DropTail(PrefixNodeId id) {
  const auto found = tail_of_.find(id);
  if (found == tail_of_.end()) return 0;
  int64_t dropped = 0;
  for (size_t g = 0; g < pools_.size(); ++g) {
    const std::vector<PageId>& pages = found->second->pages[g];
    // Frees the last page first, because the page freed last is allocated
    // first. So the pages are reused in the tail's order.
    for (size_t i = pages.size(); i-- > 0;) pools_[g]->ClearTag(pages[i]);
    tail_pages_[g] -= static_cast<int64_t>(pages.size());
    dropped += static_cast<int64_t>(pages.size());
  }
  tails_.erase(found->second);
  tail_of_.erase(found);
  return dropped;
}

int64_t PrefixIndex::DropTailThatGivesWay(PrefixNodeId id) {
  const auto found = tail_of_.find(id);
  return found != tail_of_.end() && found->second->gives_way ? DropTail(id) : 0;
}

int64_t PrefixIndex::DropOldestTail() {
  return tails_.empty() ? 0 : DropTail(tails_.front().node);
}

int32_t* PrefixIndex::tokens(PrefixNodeId id) const {
  const int64_t block = id.value() / kNodesPerBlock;
  return token_blocks_[static_cast<size_t>(block)].get() +
         id.value() % kNodesPerBlock * options_.page_tokens;
}

PrefixNodeId PrefixIndex::NewNode(PrefixNodeId parent, const PrefixHash& hash) {
  if (num_nodes_ == options_.max_nodes) return PrefixNodeId();
  if (unused_.empty()) {
    const auto id = static_cast<int32_t>(nodes_.size());
    nodes_.emplace_back();
    pages_.resize(nodes_.size() * pools_.size());
    if (id % kNodesPerBlock == 0) {
      token_blocks_.push_back(std::make_unique<int32_t[]>(
          static_cast<size_t>(kNodesPerBlock * options_.page_tokens)));
    }
    unused_.push_back(PrefixNodeId(id));
  }
  const PrefixNodeId id = unused_.back();
  unused_.pop_back();
  node(id) = Node{hash, parent.value(), 0, 0, true};
  ++num_nodes_;
  return id;
}

void PrefixIndex::Unreference(PrefixNodeId id) {
  KVASIR_CHECK(node(id).in_use && node(id).references > 0);
  --node(id).references;
  Prune(id);
}

void PrefixIndex::Prune(PrefixNodeId id) {
  while (id.valid() && node(id).references == 0 && node(id).num_pages == 0) {
    Node& gone = node(id);
    const PrefixNodeId parent(gone.parent);
    if (parent.valid()) {
      by_hash_.erase(gone.hash);
      --node(parent).references;
    } else {
      const auto salt = salts_.find(id);
      roots_.erase(salt->second);
      salts_.erase(salt);
    }
    gone.in_use = false;
    unused_.push_back(id);
    --num_nodes_;
    id = parent;
  }
}

int64_t PrefixIndex::metadata_bytes() const {
  // A flat_hash_map stores a value and one control byte for each slot.
  const size_t bytes =
      nodes_.capacity() * sizeof(Node) + pages_.capacity() * sizeof(PageId) +
      unused_.capacity() * sizeof(PrefixNodeId) +
      token_blocks_.size() *
          static_cast<size_t>(kNodesPerBlock * options_.page_tokens) *
          sizeof(int32_t) +
      by_hash_.capacity() * (sizeof(decltype(by_hash_)::value_type) + 1) +
      roots_.capacity() * (sizeof(decltype(roots_)::value_type) + 1) +
      salts_.capacity() * (sizeof(decltype(salts_)::value_type) + 1) +
      tail_of_.capacity() * (sizeof(decltype(tail_of_)::value_type) + 1) +
      tails_.size() *
          (sizeof(Tail) + pools_.size() * sizeof(std::vector<PageId>)) +
      static_cast<size_t>(
          std::accumulate(tail_pages_.begin(), tail_pages_.end(), int64_t{0})) *
          sizeof(PageId);
  return static_cast<int64_t>(bytes);
}

absl::Status PrefixIndex::CheckTails(int64_t* tagged) const {
  if (tails_.size() != tail_of_.size()) {
    return absl::InternalError(absl::StrCat(
        "prefix index: its number of tails is ", tails_.size(),
        ", but its map from nodes to tails has ", tail_of_.size(), " entries"));
  }
  std::vector<int64_t> counted(pools_.size(), 0);
  for (const Tail& tail : tails_) {
    const Node& node_of_tail = node(tail.node);
    if (!node_of_tail.in_use ||
        node_of_tail.num_pages != static_cast<int32_t>(pools_.size())) {
      return absl::InternalError(absl::StrCat(
          "prefix index: node ", tail.node.value(),
          " has a tail, so it must have one page in each of the ",
          pools_.size(), " page groups, but its number of pages is ",
          node_of_tail.in_use ? node_of_tail.num_pages : 0));
    }
    for (size_t g = 0; g < pools_.size(); ++g) {
      for (const PageId page : tail.pages[g]) {
        if (pools_[g]->tag(page) == tail.node.value()) continue;
        return absl::InternalError(
            absl::StrCat("prefix index: page ", page.value(), " of page group ",
                         g, " belongs to the tail of node ", tail.node.value(),
                         ", but its tag names node ", pools_[g]->tag(page)));
      }
      counted[g] += static_cast<int64_t>(tail.pages[g].size());
    }
  }
  for (size_t g = 0; g < pools_.size(); ++g) {
    if (counted[g] != tail_pages_[g]) {
      return absl::InternalError(absl::StrCat(
          "prefix index: the tails hold ", counted[g], " pages of page group ",
          g, ", but their counter is ", tail_pages_[g]));
    }
    *tagged += counted[g];
  }
  return absl::OkStatus();
}

absl::Status PrefixIndex::CheckInvariants() const {
  std::vector<int32_t> children(nodes_.size(), 0);
  int64_t in_use = 0;
  int64_t tagged = 0;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const Node& n = nodes_[i];
    if (!n.in_use) continue;
    ++in_use;
    if (n.parent >= 0) ++children[static_cast<size_t>(n.parent)];
    int32_t num_pages = 0;
    for (size_t g = 0; g < pools_.size(); ++g) {
      const PageId page = pages_[i * pools_.size() + g];
      if (!page.valid()) continue;
      ++num_pages;
      if (pools_[g]->tag(page) != static_cast<int32_t>(i)) {
        return absl::InternalError(
            absl::StrCat("prefix index: page ", page.value(), " of page group ",
                         g, " belongs to node ", i, ", but its tag names node ",
                         pools_[g]->tag(page)));
      }
    }
    tagged += num_pages;
    if (num_pages != n.num_pages) {
      return absl::InternalError(
          absl::StrCat("prefix index: node ", i, " has ", num_pages,
                       " pages, but its page counter is ", n.num_pages));
    }
    if (n.references == 0 && n.num_pages == 0) {
      return absl::InternalError(
          absl::StrCat("prefix index: node ", i,
                       " has no references and no pages, but was not removed"));
    }
  }
  for (size_t i = 0; i < nodes_.size(); ++i) {
    if (nodes_[i].in_use && nodes_[i].references < children[i]) {
      return absl::InternalError(absl::StrCat(
          "prefix index: node ", i, " must have a reference from each of its ",
          children[i], " children, but its reference count is ",
          nodes_[i].references));
    }
  }
  KVASIR_RETURN_IF_ERROR(CheckTails(&tagged));
  for (const PagePool* pool : pools_) {
    for (int64_t p = 0; p < pool->num_pages(); ++p) {
      tagged -= pool->tag(PageId(static_cast<int32_t>(p))) >= 0 ? 1 : 0;
    }
  }
  if (tagged != 0) {
    return absl::InternalError(absl::StrCat(
        "prefix index: the number of pages of nodes and tails minus the number "
        "of tagged pages is ",
        tagged, ", but must be 0"));
  }
  if (in_use != num_nodes_) {
    return absl::InternalError(absl::StrCat(
        "prefix index: ", in_use, " nodes are in use, but the node counter is ",
        num_nodes_));
  }
  if (static_cast<size_t>(in_use) != by_hash_.size() + roots_.size()) {
    return absl::InternalError(absl::StrCat(
        "prefix index: ", in_use, " nodes are in use, but the hash table has ",
        by_hash_.size(), " nodes and there are ", roots_.size(), " roots"));
  }
  return absl::OkStatus();
}

}  // namespace kvasir::cache
