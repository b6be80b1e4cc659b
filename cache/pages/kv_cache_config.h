// The sizes of a KV cache and the options of a sequence, as every part of the
// cache needs them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "base/strong_id.h"
#include "cache/layout/layout.h"

namespace kvasir::cache {

// StepPlan's sequence_id.
using SequenceId = base::StrongId<struct SequenceTag, int64_t>;

struct KvCacheConfig {
  struct Group {
    int64_t num_pages = 0;
    // The most keys that a query sees, itself included. 0: all keys before it.
    int64_t sliding_window = 0;
    int64_t side_pages_per_sequence = 0;
    plan::EvictionCounts eviction;
    // Bytes of one page id over all layers of the group. Only byte figures use
    // them; `payload_bytes` leaves out the padding.
    int64_t page_bytes = 0;
    int64_t payload_bytes = 0;
    // Bytes that the layout uses of one sequence's side pages.
    int64_t side_payload_bytes = 0;
    // Pages of the host pool. 0: nothing can be exported.
    int64_t num_host_pages = 0;
  };
  int64_t page_tokens = 0;    // P
  std::vector<Group> groups;  // by PageGroupId
  std::string cache_id;       // enters every prefix hash
  // False: nothing is published and nothing is looked up. It must be false if
  // any group evicts.
  bool prefix_reuse = true;

  bool has_side_pages() const {
    for (const Group& group : groups) {
      if (group.side_pages_per_sequence > 0) return true;
    }
    return false;
  }
};

// prefix_reuse is layout.prefix_reusable(). `host_pages` sizes the host pool;
// empty: there is none.
KvCacheConfig MakeKvCacheConfig(const PageLayout& layout,
                                const PageCounts& pages, std::string cache_id,
                                const PageCounts& host_pages = {});

struct StartOptions {
  // Sequences share pages only if their salts are equal.
  std::string salt;
  bool reuse_prefix = true;
  bool publish_prefix = true;
  // The length of the prompt, for eviction; 0: all tokens are the prompt.
  // Tokens that were emitted before a preemption do not belong to the prompt.
  int64_t prompt_tokens = 0;
  // Counts by page group that replace those of the config; empty: the config's
  // counts. A group that does not evict by its config never evicts.
  absl::Span<const plan::EvictionCounts> evictions;
};

inline PageGroupId GroupIdOf(size_t index) {
  return PageGroupId(static_cast<int32_t>(index));
}

}  // namespace kvasir::cache
