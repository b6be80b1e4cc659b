// KvCache: slots that a sequence gives up, and what their pages are spared.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "cache/kv_cache.h"
#include "cache/kv_cache_sequence.h"

namespace kvasir::cache {

EvictionSchedule KvCache::ScheduleOf(size_t group,
                                     absl::Span<const int32_t> token_ids,
                                     const StartOptions& options) const {
  KVASIR_CHECK(options.evictions.empty() ||
               options.evictions.size() == pools_.size());
  if (!config_.groups[group].eviction.evicts()) return {};
  const plan::EvictionCounts& counts = options.evictions.empty()
                                           ? config_.groups[group].eviction
                                           : options.evictions[group];
  if (!counts.evicts()) return {};
  return EvictionSchedule(counts, options.prompt_tokens > 0
                                      ? options.prompt_tokens
                                      : static_cast<int64_t>(token_ids.size()));
}

bool KvCache::eviction_due(SequenceId id) const {
  const Sequence& of = sequence(id);
  return std::any_of(
      of.groups.begin(), of.groups.end(),
      [](const GroupState& state) { return state.EvictionDue(); });
}

std::optional<int64_t> KvCache::next_eviction(SequenceId id) const {
  std::optional<int64_t> next;
  for (const GroupState& state : sequence(id).groups) {
    const std::optional<int64_t> point =
        state.eviction.NextPoint(state.table.logical_tokens());
    if (point && (!next || *point < *next)) next = point;
  }
  return next;
}

void KvCache::Evict(SequenceId id) {
  Sequence& of = sequence(id);
  KVASIR_CHECK(of.reserved_tokens == 0);
  const int64_t page_tokens = config_.page_tokens;
  for (size_t g = 0; g < pools_.size(); ++g) {
    GroupState& state = of.groups[g];
    if (!state.EvictionDue()) continue;
    const int64_t slots = state.table.next_slot();
    const int64_t kept = state.eviction.kept_slots();
    kvasir::v1::SlotEviction eviction;
    eviction.set_sequence_id(static_cast<uint64_t>(id.value()));
    eviction.set_page_group(static_cast<uint32_t>(g));
    eviction.set_after_page_copies(
        static_cast<uint32_t>(pending_copies_.size()));
    for (int64_t i = 0; i * page_tokens < slots; ++i) {
      eviction.add_pages(state.table.page(i).value());
    }
    eviction.set_num_slots(static_cast<uint64_t>(slots));
    eviction.set_kept_slots(static_cast<uint64_t>(kept));
    eviction.set_logical_tokens(
        static_cast<uint64_t>(state.table.logical_tokens()));
    pending_evictions_.push_back(std::move(eviction));
    ++counts_.evictions;
    counts_.slots_evicted += slots - kept;
    counts_.pages_reclaimed += state.table.Compact(kept);
    if (kept % page_tokens == 0) continue;
    pools_[g]->SetFilledSlots(state.table.page(kept / page_tokens),
                              static_cast<int32_t>(kept % page_tokens));
  }
}

void KvCache::TakeEvictions(
    google::protobuf::RepeatedPtrField<kvasir::v1::SlotEviction>* out) {
  for (kvasir::v1::SlotEviction& eviction : pending_evictions_) {
    *out->Add() = std::move(eviction);
  }
  pending_evictions_.clear();
}

void KvCache::CopyPages(const Sequence& parent, size_t group, Sequence& child) {
  const GroupState& from = parent.groups[group];
  GroupState& to = child.groups[group];
  to.eviction = from.eviction;
  for (int64_t i = 0; i * config_.page_tokens < from.table.next_slot(); ++i) {
    PagePin page = AllocatePage(group_id(group));
    CopyPage(group, from.table.page(i), page.page());
    pools_[group]->SetFilledSlots(
        page.page(), pools_[group]->filled_slots(from.table.page(i)));
    to.table.Append(std::move(page));
  }
  to.table.SetLengthsOf(from.table);
}

}  // namespace kvasir::cache
