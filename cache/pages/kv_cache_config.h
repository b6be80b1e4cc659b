// The sizes of a KV cache and the options of a sequence, which all parts of the
// cache use.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "base/strong_id.h"
#include "cache/layout/layout.h"

namespace kvasir::cache {

// The sequence_id of a StepPlan.
using SequenceId = base::StrongId<struct SequenceTag, int64_t>;

struct KvCacheConfig {
  struct Group {
    int64_t num_pages = 0;
    // A query attends to at most this many keys, its own token's included. 0:
    // no sliding window.
    int64_t sliding_window = 0;
    int64_t side_pages_per_sequence = 0;
    plan::EvictionCounts eviction;
    // The bytes of a page over all layers of the group, with and without
    // padding. Used only to report bytes.
    int64_t page_bytes = 0;
    int64_t payload_bytes = 0;
    // How many bytes of one sequence's side pages hold data.
    int64_t side_payload_bytes = 0;
    // The number of this group's pages in the host pool. 0: no sequence can
    // be exported.
    int64_t num_host_pages = 0;
  };
  int64_t page_tokens = 0;    // called P in comments
  std::vector<Group> groups;  // indexed by PageGroupId
  std::string cache_id;       // the key of all prefix hashes
  // False: pages are neither published nor looked up. It must be false if any
  // group evicts.
  bool prefix_reuse = true;

  bool has_side_pages() const {
    for (const Group& group : groups) {
      if (group.side_pages_per_sequence > 0) return true;
    }
    return false;
  }
};

// The configuration for a layout; prefix_reuse is layout.prefix_reusable().
// `host_pages` is the size of the host pool; empty: there is no host pool.
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
  // Eviction counts for each page group, which replace those of the config.
  // Empty: the config's counts are used. A group that does not evict according
  // to the config never evicts.
  absl::Span<const plan::EvictionCounts> evictions;
};

inline PageGroupId GroupIdOf(size_t index) {
  return PageGroupId(static_cast<int32_t>(index));
}

}  // namespace kvasir::cache
