#include "cache/kv_cache.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace kvasir::cache {
namespace {

KvCacheConfig Checked(KvCacheConfig config) {
  KVASIR_CHECK(!config.groups.empty() && config.page_tokens >= 1);
  for (const KvCacheConfig::Group& group : config.groups) {
    KVASIR_CHECK(group.num_pages >= 1);
    KVASIR_CHECK(!group.eviction.evicts() ||
                 (group.sliding_window == 0 && !config.prefix_reuse));
  }
  return config;
}

}  // namespace

KvCache::KvCache(KvCacheConfig config, std::unique_ptr<PrefixHasher> hasher)
    : config_(Checked(std::move(config))),
      cache_(config_, std::move(hasher), &counts_),
      tables_(config_, &cache_, &copies_, &counts_),
      images_(config_, &cache_, &copies_, &counts_) {}

KvCache::Sequence& KvCache::sequence(SequenceId id) {
  const auto it = sequences_.find(id);
  KVASIR_CHECK(it != sequences_.end());
  return *it->second;
}

const KvCache::Sequence& KvCache::sequence(SequenceId id) const {
  const auto it = sequences_.find(id);
  KVASIR_CHECK(it != sequences_.end());
  return *it->second;
}

KvCache::Sequence& KvCache::AddSequence(SequenceId id) {
  const auto [it, is_new] =
      sequences_.try_emplace(id, std::make_unique<Sequence>(config_));
  KVASIR_CHECK(is_new);
  return *it->second;
}

void KvCache::SetSchedules(size_t num_tokens, const StartOptions& options,
                           Sequence* out) const {
  for (size_t g = 0; g < config_.groups.size(); ++g) {
    out->state.groups[g].eviction = ScheduleOf(config_, g, num_tokens, options);
  }
}

StartResult KvCache::StartSequence(SequenceId id,
                                   absl::Span<const int32_t> token_ids,
                                   const StartOptions& options) {
  Sequence& added = AddSequence(id);
  SetSchedules(token_ids.size(), options, &added);
  const PrefixHit hit = cache_.Find(token_ids, options, &counts_.page_hashes);
  PrefixChain& prefix = added.prefix;
  cache_.StartChain(options, &prefix);
  tables_.TakePrefix(hit, &added.state);
  if (prefix.chain && !hit.nodes.empty()) {
    cache_.Continue(hit.nodes.back(), &prefix);
  }
  const auto num_tokens = static_cast<int64_t>(token_ids.size());
  const int64_t cached_tokens =
      static_cast<int64_t>(hit.nodes.size()) * config_.page_tokens;
  if (prefix.publishes && config_.has_side_pages()) {
    prefix.tails =
        TailPolicy({.page_tokens = config_.page_tokens,
                    .num_tokens = num_tokens,
                    .paged_tokens = hit.num_pages * config_.page_tokens,
                    .found_tokens = cached_tokens});
  }
  if (config_.prefix_reuse && options.reuse_prefix) {
    added.uncounted_query_tokens = num_tokens;
    added.uncounted_hit_tokens = cached_tokens;
  }
  return {cached_tokens};
}

int64_t KvCache::CachedPrefixTokens(absl::Span<const int32_t> token_ids,
                                    const StartOptions& options) const {
  // Find needs a counter. Its value is dropped, because the statistics count
  // only the hashes of sequences that start.
  int64_t page_hashes = 0;
  const PrefixHit hit = cache_.Find(token_ids, options, &page_hashes);
  return static_cast<int64_t>(hit.nodes.size()) * config_.page_tokens;
}

void KvCache::PublishPages(absl::Span<const int32_t> token_ids,
                           Sequence* entry) {
  const int64_t first_page =
      (entry->state.logical_tokens() - static_cast<int64_t>(token_ids.size())) /
      config_.page_tokens;
  cache_.Publish(
      token_ids, first_page,
      [&](size_t group, int64_t index) {
        return entry->state.groups[group].table.page(index);
      },
      &entry->prefix);
}

void KvCache::Commit(SequenceId id, absl::Span<const int32_t> token_ids) {
  Sequence& entry = sequence(id);
  tables_.Commit(static_cast<int64_t>(token_ids.size()), &entry.state);
  counts_.query_tokens += std::exchange(entry.uncounted_query_tokens, 0);
  counts_.hit_tokens += std::exchange(entry.uncounted_hit_tokens, 0);
  PublishPages(token_ids, &entry);
  // Publishes a tail (a copy of the side pages) only if the step wrote tokens.
  // Otherwise the side pages are unchanged, or do not exist yet.
  if (!token_ids.empty()) {
    const TailPages* tail =
        cache_.PublishTail(entry.state.logical_tokens(), &entry.prefix);
    if (tail != nullptr) tables_.CopySidePages(entry.state, *tail);
  }
  tables_.ReleaseOutsideWindows(&entry.state);
}

void KvCache::Fork(SequenceId parent_id, SequenceId child_id) {
  Sequence& child = AddSequence(child_id);
  const Sequence& parent = sequence(parent_id);
  KVASIR_CHECK(parent.state.reserved_tokens == 0 && can_fork(parent_id));
  child.prefix = cache_.Fork(parent.prefix);
  tables_.Fork(parent.state, &child.state);
  ++counts_.forks;
}

void KvCache::Release(SequenceId id) {
  const auto it = sequences_.find(id);
  KVASIR_CHECK(it != sequences_.end());
  // Copies into this sequence's pages stay in the list of page copies, because
  // later copies may read these pages. This is harmless: a new holder of such a
  // page writes to it only after all listed copies.
  const PrefixRef chain = std::move(it->second->prefix.chain);
  sequences_.erase(it);
  cache_.WarmTails(chain);
}

void KvCache::Preempt(SequenceId id) {
  Release(id);
  ++counts_.preemptions;
}

std::optional<SequenceImage> KvCache::Export(SequenceId id) {
  const Sequence& entry = sequence(id);
  std::optional<SequenceImage> image =
      images_.Export(entry.state, entry.prefix.tails);
  if (image) Preempt(id);
  return image;
}

ReserveResult KvCache::Import(SequenceId id, SequenceImage* image,
                              absl::Span<const int32_t> token_ids,
                              const StartOptions& options) {
  const ImageShape& shape = image->shape;
  KVASIR_CHECK(shape.groups.size() == config_.groups.size() &&
               static_cast<int64_t>(token_ids.size()) >= shape.logical_tokens);
  const auto committed =
      token_ids.first(static_cast<size_t>(shape.logical_tokens));
  const std::vector<PrefixNodeId> found = cache_.FindPages(committed, options);
  const ReserveResult room =
      images_.CheckRoom(*image, found, token_ids.size(), options);
  if (!room) return room;
  Sequence& added = AddSequence(id);
  added.prefix.tails = image->tails;
  SetSchedules(token_ids.size(), options, &added);
  images_.Import(*image, found, &added.state);
  cache_.StartChain(options, &added.prefix);
  PublishPages(committed, &added);
  ++counts_.imports;
  *image = SequenceImage();
  return room;
}

std::vector<PageId> KvCache::Pages(SequenceId id, PageGroupId group) const {
  const BlockTable& table = group_state(id, group).table;
  std::vector<PageId> pages;
  for (int64_t i = table.first_live(); i < table.num_entries(); ++i) {
    pages.push_back(table.page(i));
  }
  return pages;
}

std::vector<PageId> KvCache::SidePages(SequenceId id, PageGroupId group) const {
  std::vector<PageId> pages;
  for (const PagePin& page : group_state(id, group).side_pages) {
    pages.push_back(page.page());
  }
  return pages;
}

int64_t KvCache::tail_cut(SequenceId id) const {
  const PrefixChain& prefix = sequence(id).prefix;
  return prefix.chain ? prefix.tails.cut_tokens() : 0;
}

SequencePages KvCache::sequence_pages(PageGroupId group) const {
  const KvCacheConfig::Group& config =
      config_.groups[static_cast<size_t>(group.value())];
  return {.page_tokens = config_.page_tokens,
          .side_pages = config.side_pages_per_sequence,
          .sliding_window = config.sliding_window,
          .eviction = config.eviction};
}

std::vector<const SequenceState*> KvCache::States() const {
  std::vector<const SequenceState*> states;
  states.reserve(sequences_.size());
  for (const auto& [id, entry] : sequences_) states.push_back(&entry->state);
  return states;
}

KvCacheStats KvCache::Stats() const {
  KvCacheStats stats = counts_;
  int64_t owned_references = 0;
  stats.sequences = static_cast<int64_t>(sequences_.size());
  stats.metadata_bytes = cache_.index().metadata_bytes();
  for (const auto& [id, entry] : sequences_) {
    stats.logical_tokens += entry->state.logical_tokens();
    stats.metadata_bytes += static_cast<int64_t>(
        sizeof(Sequence) +
        entry->prefix.page_token_ids.capacity() * sizeof(int32_t));
    for (const GroupState& state : entry->state.groups) {
      owned_references += state.num_references();
      stats.metadata_bytes += static_cast<int64_t>(sizeof(GroupState)) +
                              state.table.metadata_bytes();
    }
  }
  stats.leaked_pages = -owned_references;
  const std::vector<const SequenceState*> states = States();
  for (size_t g = 0; g < config_.groups.size(); ++g) {
    PageGroupStats& group =
        stats.groups.emplace_back(tables_.GroupStats(g, states));
    images_.AddStats(g, &group);
    stats.leaked_pages += cache_.pool(g).total_references();
    stats.metadata_bytes +=
        cache_.pool(g).metadata_bytes() + images_.host_pool(g).metadata_bytes();
  }
  return stats;
}

absl::Status KvCache::CheckInvariants() const {
  for (size_t g = 0; g < config_.groups.size(); ++g) {
    if (!cache_.pool(g).CountersAgree() ||
        !images_.host_pool(g).CountersAgree()) {
      return absl::InternalError(
          absl::StrCat("KV cache: the page counters of page group ", g,
                       " do not match the states of its pages"));
    }
  }
  for (const auto& [id, entry] : sequences_) {
    KVASIR_RETURN_IF_ERROR(tables_.CheckSequence(id, entry->state));
  }
  KVASIR_RETURN_IF_ERROR(tables_.CheckReferences(States()));
  KVASIR_RETURN_IF_ERROR(cache_.index().CheckInvariants());
  if (const int64_t leaked = Stats().leaked_pages; leaked != 0) {
    return absl::InternalError(
        absl::StrCat("KV cache: ", leaked,
                     " page references belong to no live sequence, but there "
                     "must be none"));
  }
  return absl::OkStatus();
}

}  // namespace kvasir::cache
