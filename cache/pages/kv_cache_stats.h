// The statistics of the cache: gauges for its current state, and counts of what
// it has done.
#pragma once

#include <cstdint>
#include <vector>

namespace kvasir::cache {

// The state of one page group's pool. num_pages == used_pages + free_pages.
struct PageGroupStats {
  int64_t num_pages = 0;
  int64_t used_pages = 0;    // referenced by a sequence
  int64_t free_pages = 0;    // can be allocated now; includes cached pages
  int64_t cached_pages = 0;  // free pages that prompts can still find
  int64_t side_pages = 0;    // used pages other than token pages
  int64_t tail_pages = 0;    // copies of side pages that prompts can find
  // Slots of used token pages, and how many of these slots hold a token.
  int64_t held_slots = 0;
  int64_t filled_slots = 0;
  // The number of slots that sequences hold. A shared slot counts once for each
  // sequence.
  int64_t physical_tokens = 0;
  // pool_bytes, used_bytes and cached_bytes are the bytes of num_pages,
  // used_pages and cached_pages.
  int64_t pool_bytes = 0;
  int64_t used_bytes = 0;
  int64_t cached_bytes = 0;
  // The unused bytes of used token pages: padding of regions, and slots without
  // a token.
  int64_t padding_bytes = 0;
  int64_t unfilled_bytes = 0;
  // The bytes of side_pages, and how many of these bytes hold no data.
  int64_t side_bytes = 0;
  int64_t side_unused_bytes = 0;
  // The number of pages of the host pool, and how many of them belong to
  // images.
  int64_t host_pages = 0;
  int64_t host_used_pages = 0;
  int64_t host_bytes = 0;
  int64_t host_used_bytes = 0;
};

// Counts since the cache was constructed, except for the fields marked
// as gauges.
struct KvCacheStats {
  std::vector<PageGroupStats> groups;  // gauges
  int64_t sequences = 0;               // gauge
  int64_t logical_tokens = 0;          // gauge: tokens of all live sequences
  // Gauge: page references that belong to no live sequence. Any value but 0 is
  // a bug.
  int64_t leaked_pages = 0;
  int64_t metadata_bytes = 0;  // gauge: host memory of pools, tables and index
  // The number of tokens in prompts that ran with prefix reuse, and how many of
  // these tokens were found in the cache.
  int64_t query_tokens = 0;
  int64_t hit_tokens = 0;
  int64_t pages_allocated = 0;
  // The number of cached pages that were dropped because the page or its index
  // node was needed.
  int64_t pages_evicted = 0;
  // copies of shared pages before a write, and of side pages
  int64_t pages_copied = 0;
  int64_t pages_published = 0;
  int64_t pages_unpublished = 0;  // full pages that the index could not take
  int64_t tails_published = 0;
  int64_t pages_window_released = 0;
  // Evictions of slots, counted once per sequence and group.
  int64_t evictions = 0;
  int64_t slots_evicted = 0;
  int64_t pages_reclaimed = 0;  // token pages that evictions freed
  int64_t page_hashes = 0;
  int64_t table_entries_sent = 0;
  int64_t forks = 0;
  int64_t preemptions = 0;
  int64_t exports = 0;  // also counted in preemptions
  int64_t imports = 0;
  int64_t bytes_exported = 0;
  int64_t bytes_imported = 0;
};

}  // namespace kvasir::cache
