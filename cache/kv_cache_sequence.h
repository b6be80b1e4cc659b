// The state of one sequence inside KvCache; included by its sources only.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/eviction/eviction_schedule.h"
#include "cache/kv_cache.h"
#include "cache/prefix/tail_policy.h"
#include "cache/tables/block_table.h"

namespace kvasir::cache {

// One sequence in one page group.
struct KvCache::GroupState {
  explicit GroupState(int64_t page_tokens) : table(page_tokens) {}

  BlockTable table;
  EvictionSchedule eviction;
  std::vector<PagePin> side_pages;
  bool side_pages_sent = false;
  // Of one that has not reserved yet: what its side pages will be copies of.
  std::vector<PagePin> tail_pages;
  // Of a fork that has not reserved yet: the page whose first slots it will
  // copy. The table ends before it.
  PagePin fork_page;

  // Slots go before the next token comes.
  bool EvictionDue() const {
    return eviction.IsPoint(table.logical_tokens()) &&
           table.next_slot() > eviction.kept_slots();
  }
  bool CanTakeOver(const PagePool& pool) const {
    return static_cast<bool>(fork_page) &&
           pool.references(fork_page.page()) == 1;
  }
  template <typename Function>
  void ForEachPage(Function&& function) const {
    for (int64_t i = table.first_live(); i < table.num_entries(); ++i) {
      function(table.page(i));
    }
    for (const PagePin& page : side_pages) function(page.page());
    for (const PagePin& page : tail_pages) function(page.page());
    if (fork_page) function(fork_page.page());
  }
  // References that ForEachPage visits.
  int64_t num_references() const {
    return table.num_live() +
           static_cast<int64_t>(side_pages.size() + tail_pages.size()) +
           (fork_page ? 1 : 0);
  }
};

struct KvCache::Sequence {
  explicit Sequence(const KvCacheConfig& config) {
    groups.reserve(config.groups.size());
    for (size_t g = 0; g < config.groups.size(); ++g) {
      groups.emplace_back(config.page_tokens);
    }
    pages_to_publish.resize(config.groups.size());
  }

  std::vector<GroupState> groups;
  int64_t reserved_tokens = 0;
  bool publishes = false;
  // Of the prompt, until the first commit counts them: a start that finds no
  // pages to reserve is undone and tried again, and is one query, not many.
  int64_t uncounted_query_tokens = 0;
  int64_t uncounted_hit_tokens = 0;
  // The node of the last full page. Empty once a page could not be published.
  PrefixRef chain;
  TailPolicy tails;
  // The node of its newest tail that gives way, where there still is one.
  PrefixRef tail_that_gives_way;
  // Tokens of the last, partly filled page; only where publishes.
  std::vector<int32_t> page_token_ids;
  std::vector<PageId> pages_to_publish;  // by group; reused between calls
};

}  // namespace kvasir::cache
