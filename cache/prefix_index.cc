#include "cache/prefix_index.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace kvasir::cache {

void PrefixRef::Reset() {
  if (index_ == nullptr) return;
  std::exchange(index_, nullptr)->Unreference(node_);
}

PrefixIndex::PrefixIndex(const PrefixIndexOptions& options,
                         std::vector<PagePool*> pools)
    : options_(options), pools_(std::move(pools)) {
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
    if (by_hash_.contains(page.hash)) return PrefixRef();  // a collision
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

bool PrefixIndex::EvictOldest(PageGroupId group) {
  const PageId oldest =
      pools_[static_cast<size_t>(group.value())]->oldest_cached();
  if (!oldest.valid()) return false;
  Forget(group, oldest);
  return true;
}

void PrefixIndex::Forget(PageGroupId group, PageId page) {
  PagePool& pool = *pools_[static_cast<size_t>(group.value())];
  const PrefixNodeId id(pool.tag(page));
  KVASIR_CHECK(id.valid() && page_slot(id, group) == page);
  page_slot(id, group) = PageId();
  --node(id).num_pages;
  pool.ClearTag(page);
  Prune(id);
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
  // A slot of a flat_hash_map is its value and one control byte.
  const size_t bytes =
      nodes_.capacity() * sizeof(Node) + pages_.capacity() * sizeof(PageId) +
      unused_.capacity() * sizeof(PrefixNodeId) +
      token_blocks_.size() *
          static_cast<size_t>(kNodesPerBlock * options_.page_tokens) *
          sizeof(int32_t) +
      by_hash_.capacity() * (sizeof(decltype(by_hash_)::value_type) + 1) +
      roots_.capacity() * (sizeof(decltype(roots_)::value_type) + 1) +
      salts_.capacity() * (sizeof(decltype(salts_)::value_type) + 1);
  return static_cast<int64_t>(bytes);
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
        return absl::InternalError(absl::StrCat(
            "page ", page.value(), " of group ", g, " has the tag ",
            pools_[g]->tag(page), ", want node ", i));
      }
    }
    tagged += num_pages;
    if (num_pages != n.num_pages) {
      return absl::InternalError(absl::StrCat(
          "node ", i, " counts ", n.num_pages, " pages, has ", num_pages));
    }
    if (n.references == 0 && n.num_pages == 0) {
      return absl::InternalError(
          absl::StrCat("nothing needs node ", i, ", and it is there"));
    }
  }
  for (size_t i = 0; i < nodes_.size(); ++i) {
    if (nodes_[i].in_use && nodes_[i].references < children[i]) {
      return absl::InternalError(absl::StrCat("node ", i, " has ", children[i],
                                              " children, counts ",
                                              nodes_[i].references));
    }
  }
  for (const PagePool* pool : pools_) {
    for (int64_t p = 0; p < pool->num_pages(); ++p) {
      tagged -= pool->tag(PageId(static_cast<int32_t>(p))) >= 0 ? 1 : 0;
    }
  }
  if (tagged != 0 || in_use != num_nodes_ ||
      static_cast<size_t>(in_use) != by_hash_.size() + roots_.size()) {
    return absl::InternalError(
        absl::StrCat("index of ", in_use, " nodes counts ", num_nodes_,
                     ", finds ", by_hash_.size(), " pages and ", roots_.size(),
                     " roots; ", tagged, " more pages in nodes than tags"));
  }
  return absl::OkStatus();
}

}  // namespace kvasir::cache
