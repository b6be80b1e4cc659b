// The cache of a simulated replica: a set of pages of bounded size, which
// forgets the page that was used least recently and that no request uses.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"

namespace kvasir::bench {

class PageCache {
 public:
  // While requests use more pages than `capacity`, the cache exceeds it.
  explicit PageCache(size_t capacity) : capacity_(capacity), nodes_(1) {}

  // Returns how many of the first pages are in the cache.
  size_t Hits(absl::Span<const uint64_t> pages) const;
  // Adds the pages if necessary, and keeps them until Release.
  void Use(absl::Span<const uint64_t> pages);
  // Ends one Use of the same pages. Pages at the end are forgotten first.
  void Release(absl::Span<const uint64_t> pages);
  // Adds pages that no request uses, or makes them the newest.
  void Add(absl::Span<const uint64_t> pages) {
    Use(pages);
    Release(pages);
  }

  size_t size() const { return index_.size(); }
  // The number of pages that requests use.
  size_t used() const { return used_; }

 private:
  struct Node {
    uint64_t page = 0;
    uint32_t users = 0;
    // In the ring of unused pages, of which nodes_[0] is the head: after it
    // comes the oldest.
    uint32_t before = 0;
    uint32_t after = 0;
  };
  void Unlink(uint32_t id);
  uint32_t NewNode(uint64_t page);

  const size_t capacity_;
  size_t used_ = 0;
  absl::flat_hash_map<uint64_t, uint32_t> index_;
  std::vector<Node> nodes_;
  std::vector<uint32_t> free_;
};

}  // namespace kvasir::bench
