// The functions of SequenceTables that compute statistics and check invariants.
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "cache/tables/sequence_tables.h"

namespace kvasir::cache {

PageGroupStats SequenceTables::GroupStats(size_t group,
                                          States sequences) const {
  const KvCacheConfig::Group& config = config_.groups[group];
  const PagePool& pages = pool(group);
  PageGroupStats stats;
  stats.num_pages = pages.num_pages();
  stats.used_pages = pages.used_pages();
  stats.free_pages = pages.available_pages();
  stats.cached_pages = pages.cached_pages();
  // A tail counts once, although several sequences may wait for copies of it.
  absl::flat_hash_set<PageId> held_tails;
  for (const SequenceState* sequence : sequences) {
    const GroupState& state = sequence->groups[group];
    stats.side_pages += static_cast<int64_t>(state.side_pages.size());
    stats.physical_tokens += state.table.physical_tokens();
    for (const PagePin& page : state.tail_pages) held_tails.insert(page.page());
  }
  stats.side_pages += static_cast<int64_t>(held_tails.size());
  stats.tail_pages = cache_.index().tail_pages(GroupIdOf(group));
  const int64_t token_pages = stats.used_pages - stats.side_pages;
  stats.held_slots = token_pages * config_.page_tokens;
  stats.filled_slots = pages.total_filled_slots();
  stats.pool_bytes = stats.num_pages * config.page_bytes;
  stats.used_bytes = stats.used_pages * config.page_bytes;
  stats.cached_bytes = stats.cached_pages * config.page_bytes;
  stats.padding_bytes =
      token_pages * (config.page_bytes - config.payload_bytes);
  stats.unfilled_bytes =
      token_pages * config.payload_bytes -
      stats.filled_slots * config.payload_bytes / config_.page_tokens;
  stats.side_bytes = stats.side_pages * config.page_bytes;
  if (stats.side_pages > 0) {
    stats.side_unused_bytes =
        stats.side_bytes - stats.side_pages / config.side_pages_per_sequence *
                               config.side_payload_bytes;
  }
  return stats;
}

absl::Status SequenceTables::CheckSequence(
    SequenceId id, const SequenceState& sequence) const {
  const auto broken = [id](size_t group, const auto&... what) {
    return absl::InternalError(absl::StrCat(
        "sequence ", id.value(), ", page group ", group, ": ", what...));
  };
  const int64_t page_tokens = config_.page_tokens;
  const int64_t logical = sequence.logical_tokens();
  for (size_t g = 0; g < num_groups(); ++g) {
    const GroupState& state = sequence.groups[g];
    const BlockTable& table = state.table;
    if (table.logical_tokens() != logical) {
      return broken(g, "the number of its logical tokens is ",
                    table.logical_tokens(), ", but in page group 0 it is ",
                    logical);
    }
    if (table.physical_tokens() > logical || table.physical_tokens() < 0) {
      return broken(g, "it holds ", table.physical_tokens(),
                    " slots, but must hold 0 to ", logical,
                    ", its number of tokens");
    }
    const int64_t visible =
        FirstVisibleToken(config_.groups[g].sliding_window, logical);
    if (table.first_live() != visible / page_tokens) {
      return broken(g, "its first live entry is ", table.first_live(),
                    ", but the first visible token, ", visible,
                    ", is in entry ", visible / page_tokens);
    }
    if (config_.groups[g].eviction.evicts()) {
      const int64_t slots = table.next_slot();
      if (slots != state.eviction.SlotsAfter(logical) &&
          !(state.EvictionDue() &&
            slots == state.eviction.SlotsBefore(logical))) {
        return broken(g, "after ", logical, " tokens it must hold ",
                      state.eviction.SlotsAfter(logical), " slots, but holds ",
                      slots);
      }
      for (int64_t i = 0; i < table.num_entries(); ++i) {
        if (pool(g).references(table.page(i)) == 1) continue;
        return broken(g, "it evicts slots of page ", table.page(i).value(),
                      ", which another sequence also holds");
      }
    }
    for (const PagePin& side : state.side_pages) {
      if (pool(g).references(side.page()) == 1 &&
          pool(g).tag(side.page()) < 0) {
        continue;
      }
      return broken(g, "side page ", side.page().value(),
                    " is shared or in the prefix index");
    }
    if (!state.tail_pages.empty() && !state.side_pages.empty()) {
      return broken(
          g, "it has side pages, although it still waits for copies of a tail");
    }
    const int64_t end = table.next_slot() + sequence.reserved_tokens;
    const int64_t entries = table.num_entries() + (state.fork_page ? 1 : 0);
    if (entries * page_tokens < end) {
      return broken(g, "its ", entries,
                    " block table entries do not have room for its ", end,
                    " slots");
    }
    // The pages that the next step writes must not be in the prefix index.
    for (int64_t i = table.next_slot() / page_tokens;
         i * page_tokens < end && !state.fork_page; ++i) {
      if (pool(g).tag(table.page(i)) >= 0) {
        return broken(g, "its next step writes page ", table.page(i).value(),
                      ", which the prefix index holds");
      }
    }
  }
  return absl::OkStatus();
}

absl::Status SequenceTables::CheckReferences(States sequences) const {
  for (size_t g = 0; g < num_groups(); ++g) {
    const PagePool& pages = pool(g);
    struct Seen {
      int64_t references = 0;
      int64_t tables = 0;  // block table entries that refer to the page
      bool written = false;
    };
    std::vector<Seen> seen(static_cast<size_t>(pages.num_pages()));
    for (const SequenceState* sequence : sequences) {
      const GroupState& state = sequence->groups[g];
      state.ForEachPage([&seen](PageId page) {
        ++seen[static_cast<size_t>(page.value())].references;
      });
      const int64_t full = state.table.next_slot() / config_.page_tokens;
      for (int64_t i = state.table.first_live(); i < state.table.num_entries();
           ++i) {
        Seen& page = seen[static_cast<size_t>(state.table.page(i).value())];
        ++page.tables;
        page.written = page.written || i >= full;
      }
    }
    for (int64_t p = 0; p < pages.num_pages(); ++p) {
      const PageId page(static_cast<int32_t>(p));
      const Seen& s = seen[static_cast<size_t>(p)];
      if (s.references != pages.references(page)) {
        return absl::InternalError(absl::StrCat(
            "page group ", g, ": the reference count of page ", p, " is ",
            pages.references(page),
            ", but the number of references that sequences hold is ",
            s.references));
      }
      if (s.written && s.tables > 1) {
        return absl::InternalError(absl::StrCat(
            "page group ", g, ": page ", p, " is shared by ", s.tables,
            " block tables, although at least one of them can still write to "
            "it"));
      }
      const PrefixNodeId node(pages.tag(page));
      if (node.valid() && cache_.page(node, g) == page &&
          pages.filled_slots(page) != config_.page_tokens) {
        return absl::InternalError(absl::StrCat(
            "page group ", g, ": page ", p,
            " is in the prefix index, so it must be full, but only ",
            pages.filled_slots(page), " of its ", config_.page_tokens,
            " slots are filled"));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace kvasir::cache
