// The pages of one sequence, by page group.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "cache/eviction/eviction_schedule.h"
#include "cache/pages/kv_cache_config.h"
#include "cache/pages/page_pool.h"
#include "cache/tables/block_table.h"

namespace kvasir::cache {

// The state of one sequence in one page group.
struct GroupState {
  explicit GroupState(int64_t page_tokens) : table(page_tokens) {}

  BlockTable table;
  EvictionSchedule eviction;
  std::vector<PagePin> side_pages;
  bool side_pages_sent = false;
  // The pages of the tail that was found. The first reservation copies them
  // into the sequence's own side pages; after that, this is empty.
  std::vector<PagePin> tail_pages;
  // Set only in a fork before its first reservation: the parent's partly filled
  // page, which that reservation copies. The fork's block table ends before
  // this page.
  PagePin fork_page;

  // True if slots must be evicted before the next token is written.
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
  // How many references to pages this sequence holds in the group: as many as
  // ForEachPage visits.
  int64_t num_references() const {
    return table.num_live() +
           static_cast<int64_t>(side_pages.size() + tail_pages.size()) +
           (fork_page ? 1 : 0);
  }
};

struct SequenceState {
  explicit SequenceState(const KvCacheConfig& config) {
    groups.reserve(config.groups.size());
    for (size_t g = 0; g < config.groups.size(); ++g) {
      groups.emplace_back(config.page_tokens);
    }
  }

  int64_t logical_tokens() const { return groups[0].table.logical_tokens(); }
  bool EvictionDue() const {
    return std::any_of(
        groups.begin(), groups.end(),
        [](const GroupState& state) { return state.EvictionDue(); });
  }
  std::optional<int64_t> NextEviction() const {
    std::optional<int64_t> next;
    for (const GroupState& state : groups) {
      const std::optional<int64_t> point =
          state.eviction.NextPoint(state.table.logical_tokens());
      if (point && (!next || *point < *next)) next = point;
    }
    return next;
  }

  std::vector<GroupState> groups;
  int64_t reserved_tokens = 0;
};

// The eviction schedule in a group for a sequence that starts with `num_tokens`
// tokens.
EvictionSchedule ScheduleOf(const KvCacheConfig& config, size_t group,
                            size_t num_tokens, const StartOptions& options);

}  // namespace kvasir::cache
