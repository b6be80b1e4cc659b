// Accounting and self-checks of KvCache.
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "cache/kv_cache.h"
#include "cache/kv_cache_sequence.h"

namespace kvasir::cache {

PageGroupStats KvCache::GroupStats(size_t group) const {
  const KvCacheConfig::Group& config = config_.groups[group];
  const PagePool& pages = *pools_[group];
  PageGroupStats stats;
  stats.num_pages = pages.num_pages();
  stats.used_pages = pages.used_pages();
  stats.free_pages = pages.available_pages();
  stats.cached_pages = pages.cached_pages();
  // Several sequences may hold one until each has its copy.
  absl::flat_hash_set<PageId> held_tails;
  for (const auto& [id, of] : sequences_) {
    const GroupState& state = of->groups[group];
    stats.side_pages += static_cast<int64_t>(state.side_pages.size());
    stats.physical_tokens += state.table.physical_tokens();
    for (const PagePin& page : state.tail_pages) held_tails.insert(page.page());
  }
  stats.side_pages += static_cast<int64_t>(held_tails.size());
  stats.tail_pages = index_->tail_pages(group_id(group));
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
  stats.host_pages = host_pools_[group]->num_pages();
  stats.host_used_pages = host_pools_[group]->used_pages();
  stats.host_bytes = stats.host_pages * config.page_bytes;
  stats.host_used_bytes = stats.host_used_pages * config.page_bytes;
  if (stats.side_pages > 0) {
    stats.side_unused_bytes =
        stats.side_bytes - stats.side_pages / config.side_pages_per_sequence *
                               config.side_payload_bytes;
  }
  return stats;
}

KvCacheStats KvCache::Stats() const {
  KvCacheStats stats = counts_;
  int64_t owned_references = 0;
  stats.sequences = static_cast<int64_t>(sequences_.size());
  stats.metadata_bytes = index_->metadata_bytes();
  for (const auto& [id, of] : sequences_) {
    stats.logical_tokens += of->groups[0].table.logical_tokens();
    stats.metadata_bytes += static_cast<int64_t>(
        sizeof(Sequence) + of->page_token_ids.capacity() * sizeof(int32_t));
    for (const GroupState& state : of->groups) {
      owned_references += state.num_references();
      stats.metadata_bytes += static_cast<int64_t>(sizeof(GroupState)) +
                              state.table.metadata_bytes();
    }
  }
  stats.leaked_pages = -owned_references;
  for (size_t g = 0; g < pools_.size(); ++g) {
    stats.groups.push_back(GroupStats(g));
    stats.leaked_pages += pools_[g]->total_references();
    stats.metadata_bytes +=
        pools_[g]->metadata_bytes() + host_pools_[g]->metadata_bytes();
  }
  return stats;
}

absl::Status KvCache::CheckSequence(SequenceId id, const Sequence& of) const {
  const auto broken = [id](size_t group, const auto&... what) {
    return absl::InternalError(
        absl::StrCat("sequence ", id.value(), " group ", group, ": ", what...));
  };
  const int64_t page_tokens = config_.page_tokens;
  const int64_t logical = of.groups[0].table.logical_tokens();
  for (size_t g = 0; g < pools_.size(); ++g) {
    const GroupState& state = of.groups[g];
    const BlockTable& table = state.table;
    if (table.logical_tokens() != logical) {
      return broken(g, table.logical_tokens(), " logical tokens, group 0 has ",
                    logical);
    }
    if (table.physical_tokens() > logical || table.physical_tokens() < 0) {
      return broken(g, table.physical_tokens(), " slots held for ", logical,
                    " tokens");
    }
    const int64_t visible =
        FirstVisibleToken(config_.groups[g].sliding_window, logical);
    if (table.first_live() != visible / page_tokens) {
      return broken(g, "first live entry ", table.first_live(),
                    ", the first visible token is ", visible);
    }
    if (config_.groups[g].eviction.evicts()) {
      const int64_t slots = table.next_slot();
      if (slots != state.eviction.SlotsAfter(logical) &&
          !(state.EvictionDue() &&
            slots == state.eviction.SlotsBefore(logical))) {
        return broken(g, slots, " slots held for ", logical, " tokens, want ",
                      state.eviction.SlotsAfter(logical));
      }
      for (int64_t i = 0; i < table.num_entries(); ++i) {
        if (pools_[g]->references(table.page(i)) == 1) continue;
        return broken(g, "evicts from page ", table.page(i).value(),
                      ", which is another's too");
      }
    }
    for (const PagePin& side : state.side_pages) {
      if (pools_[g]->references(side.page()) == 1 &&
          pools_[g]->tag(side.page()) < 0) {
        continue;
      }
      return broken(g, "side page ", side.page().value(), " is another's too");
    }
    if (!state.tail_pages.empty() && !state.side_pages.empty()) {
      return broken(g, "has side pages and waits for copies of a tail");
    }
    const int64_t end = table.next_slot() + of.reserved_tokens;
    const int64_t entries = table.num_entries() + (state.fork_page ? 1 : 0);
    if (entries * page_tokens < end) {
      return broken(g, entries, " entries for ", end, " slots");
    }
    // What the next step writes is this sequence's own and not to be found.
    for (int64_t i = table.next_slot() / page_tokens;
         i * page_tokens < end && !state.fork_page; ++i) {
      if (pools_[g]->tag(table.page(i)) >= 0) {
        return broken(g, "writes page ", table.page(i).value(),
                      ", which the prefix index holds");
      }
    }
  }
  return absl::OkStatus();
}

absl::Status KvCache::CheckReferences() const {
  for (size_t g = 0; g < pools_.size(); ++g) {
    const PagePool& pages = *pools_[g];
    struct Seen {
      int64_t references = 0;
      int64_t tables = 0;  // entries of block tables
      bool written = false;
    };
    std::vector<Seen> seen(static_cast<size_t>(pages.num_pages()));
    for (const auto& [id, of] : sequences_) {
      const GroupState& state = of->groups[g];
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
            "group ", g, " page ", p, " counts ", pages.references(page),
            " references, sequences have ", s.references));
      }
      if (s.written && s.tables > 1) {
        return absl::InternalError(absl::StrCat("group ", g, " page ", p,
                                                " is in ", s.tables,
                                                " tables and not full in all"));
      }
      const PrefixNodeId node(pages.tag(page));
      if (node.valid() && index_->page(node, group_id(g)) == page &&
          pages.filled_slots(page) != config_.page_tokens) {
        return absl::InternalError(
            absl::StrCat("group ", g, " page ", p, " can be found and holds ",
                         pages.filled_slots(page), " tokens"));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status KvCache::CheckInvariants() const {
  for (size_t g = 0; g < pools_.size(); ++g) {
    if (!pools_[g]->CountersAgree() || !host_pools_[g]->CountersAgree()) {
      return absl::InternalError(
          absl::StrCat("the counters of pool ", g, " contradict its pages"));
    }
  }
  for (const auto& [id, of] : sequences_) {
    KVASIR_RETURN_IF_ERROR(CheckSequence(id, *of));
  }
  KVASIR_RETURN_IF_ERROR(CheckReferences());
  KVASIR_RETURN_IF_ERROR(index_->CheckInvariants());
  if (const int64_t leaked = Stats().leaked_pages; leaked != 0) {
    return absl::InternalError(absl::StrCat(leaked, " leaked references"));
  }
  return absl::OkStatus();
}

}  // namespace kvasir::cache
