#include "bench/router/page_cache.h"

namespace kvasir::bench {

size_t PageCache::Hits(absl::Span<const uint64_t> pages) const {
  size_t hits = 0;
  while (hits < pages.size() && index_.contains(pages[hits])) ++hits;
  return hits;
}

void PageCache::Unlink(uint32_t id) {
  const Node& node = nodes_[id];
  nodes_[node.before].after = node.after;
  nodes_[node.after].before = node.before;
}

uint32_t PageCache::NewNode(uint64_t page) {
  if (index_.size() >= capacity_ && nodes_[0].after != 0) {
    const uint32_t oldest = nodes_[0].after;
    Unlink(oldest);
    index_.erase(nodes_[oldest].page);
    free_.push_back(oldest);
  }
  uint32_t id = static_cast<uint32_t>(nodes_.size());
  if (free_.empty()) {
    nodes_.emplace_back();
  } else {
    id = free_.back();
    free_.pop_back();
  }
  nodes_[id] = {.page = page};
  index_.emplace(page, id);
  return id;
}

void PageCache::Use(absl::Span<const uint64_t> pages) {
  // First the pages that are there, so that no new page replaces one of them.
  std::vector<uint64_t> missing;
  for (const uint64_t page : pages) {
    const auto found = index_.find(page);
    if (found == index_.end()) {
      missing.push_back(page);
    } else if (nodes_[found->second].users++ == 0) {
      ++used_;
      Unlink(found->second);
    }
  }
  for (const uint64_t page : missing) {
    nodes_[NewNode(page)].users = 1;
    ++used_;
  }
}

void PageCache::Release(absl::Span<const uint64_t> pages) {
  for (size_t i = pages.size(); i-- > 0;) {
    const uint32_t id = index_.at(pages[i]);
    if (--nodes_[id].users > 0) continue;
    --used_;
    const uint32_t newest = nodes_[0].before;
    nodes_[id].before = newest;
    nodes_[id].after = 0;
    nodes_[newest].after = id;
    nodes_[0].before = id;
  }
}

}  // namespace kvasir::bench
