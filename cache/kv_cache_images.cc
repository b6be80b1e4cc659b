// KvCache: images of sequences in the host pool.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "cache/kv_cache.h"
#include "cache/kv_cache_sequence.h"

namespace kvasir::cache {
namespace {

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

ImageShape KvCache::ShapeOf(SequenceId id) const {
  const Sequence& of = sequence(id);
  ImageShape shape;
  shape.logical_tokens = of.groups[0].table.logical_tokens();
  for (const GroupState& state : of.groups) {
    const BlockTable& table = state.table;
    const size_t side = state.side_pages.size() + state.tail_pages.size();
    shape.groups.push_back(
        {.physical_tokens = table.physical_tokens(),
         .first_page = table.first_live(),
         .num_pages = CeilDiv(table.physical_tokens(), config_.page_tokens),
         // What was reserved for a first step and never written is nothing.
         .num_side_pages =
             shape.logical_tokens > 0 ? static_cast<int64_t>(side) : 0,
         .kept_slots = state.eviction.kept_slots()});
    shape.prompt_tokens =
        std::max(shape.prompt_tokens, state.eviction.prompt_tokens());
  }
  return shape;
}

int64_t KvCache::ImageBytes(const ImageShape& shape) const {
  int64_t bytes = 0;
  for (size_t g = 0; g < shape.groups.size(); ++g) {
    bytes += (shape.groups[g].num_pages + shape.groups[g].num_side_pages) *
             config_.groups[g].page_bytes;
  }
  return bytes;
}

int64_t KvCache::SharedTokens(SequenceId id) const {
  const GroupState& state = sequence(id).groups[0];
  const int64_t full = state.table.next_slot() / config_.page_tokens;
  int64_t pages = 0;
  for (int64_t i = state.table.first_live(); i < full; ++i) {
    pages += pools_[0]->references(state.table.page(i)) > 1 ? 1 : 0;
  }
  return pages * config_.page_tokens;
}

// False, and no page taken, where too few are free.
bool KvCache::AllocateHostPages(SequenceImage* image) {
  const std::vector<ImageGroupShape>& groups = image->shape.groups;
  for (size_t g = 0; g < groups.size(); ++g) {
    if (groups[g].num_pages + groups[g].num_side_pages >
        host_pools_[g]->free_pages()) {
      return false;
    }
  }
  image->pages.resize(groups.size());
  for (size_t g = 0; g < groups.size(); ++g) {
    for (int64_t i = groups[g].num_pages + groups[g].num_side_pages; i > 0;
         --i) {
      image->pages[g].push_back(*host_pools_[g]->Allocate());
    }
  }
  return true;
}

std::optional<SequenceImage> KvCache::Export(SequenceId id) {
  const Sequence& of = sequence(id);
  SequenceImage image;
  image.shape = ShapeOf(id);
  image.tails = of.tails;
  if (!AllocateHostPages(&image)) return std::nullopt;
  for (size_t g = 0; g < pools_.size(); ++g) {
    const GroupState& state = of.groups[g];
    const ImageGroupShape& shape = image.shape.groups[g];
    auto to = image.pages[g].begin();
    for (int64_t i = 0; i < shape.num_pages; ++i) {
      const int64_t entry = shape.first_page + i;
      // A fork that has not run: the last page is its parent's.
      const PageId from = entry < state.table.num_entries()
                              ? state.table.page(entry)
                              : state.fork_page.page();
      ListCopy(g, from, (to++)->page()).set_to_host(true);
    }
    if (shape.num_side_pages == 0) continue;
    // One that has not run has the tail that it found.
    for (const PagePin& page :
         state.side_pages.empty() ? state.tail_pages : state.side_pages) {
      ListCopy(g, page.page(), (to++)->page()).set_to_host(true);
    }
  }
  counts_.bytes_exported += ImageBytes(image.shape);
  ++counts_.exports;
  Preempt(id);
  return image;
}

// The nodes of the full pages of these tokens, as far as there are any; each
// may have a page in some groups and not in others.
std::vector<PrefixNodeId> KvCache::FindPages(
    absl::Span<const int32_t> token_ids, const StartOptions& options) const {
  std::vector<PrefixNodeId> found;
  if (!config_.prefix_reuse || !options.reuse_prefix) return found;
  const auto page_tokens = static_cast<size_t>(config_.page_tokens);
  PrefixNodeId node = index_->FindRoot(options.salt);
  for (size_t at = 0; at + page_tokens <= token_ids.size() && node.valid();
       at += page_tokens) {
    const auto page = token_ids.subspan(at, page_tokens);
    node = index_->FindChild(node, hasher_->Extend(index_->hash(node), page),
                             page);
    if (node.valid()) found.push_back(node);
  }
  return found;
}

ReserveResult KvCache::Import(SequenceId id, SequenceImage* image,
                              absl::Span<const int32_t> token_ids,
                              const StartOptions& options) {
  const ImageShape& shape = image->shape;
  KVASIR_CHECK(shape.groups.size() == pools_.size() &&
               static_cast<int64_t>(token_ids.size()) >= shape.logical_tokens);
  const auto committed =
      token_ids.first(static_cast<size_t>(shape.logical_tokens));
  const bool runs_more = token_ids.size() > committed.size();
  const std::vector<PrefixNodeId> found = FindPages(committed, options);
  for (size_t g = 0; g < pools_.size(); ++g) {
    const ImageGroupShape& group = shape.groups[g];
    const EvictionSchedule eviction = ScheduleOf(g, token_ids, options);
    // What is evicted first leaves room in the last page.
    const bool is_full = group.physical_tokens % config_.page_tokens == 0 &&
                         !(eviction.IsPoint(shape.logical_tokens) &&
                           group.physical_tokens > eviction.kept_slots());
    auto want = static_cast<int64_t>(image->pages[g].size());
    int64_t have = pools_[g]->available_pages();
    if (runs_more && is_full) ++want;
    if (runs_more && group.num_side_pages == 0) {
      want += config_.groups[g].side_pages_per_sequence;
    }
    for (int64_t i = group.first_page; i < static_cast<int64_t>(found.size());
         ++i) {
      const PageId page =
          index_->page(found[static_cast<size_t>(i)], group_id(g));
      if (!page.valid()) continue;
      --want;
      if (pools_[g]->references(page) == 0) --have;
    }
    if (want <= have) continue;
    return {.ok = false,
            .group = group_id(g),
            .want_pages = want,
            .free_pages = have};
  }
  Sequence& added = AddSequence(id);
  added.tails = image->tails;
  for (size_t g = 0; g < pools_.size(); ++g) {
    added.groups[g].eviction = ScheduleOf(g, token_ids, options);
  }
  for (size_t g = 0; g < pools_.size(); ++g) {
    ImportPages(g, *image, found, &added);
  }
  added.publishes = config_.prefix_reuse && options.publish_prefix;
  if (added.publishes) {
    const PrefixHash root = hasher_->Root(options.salt);
    do {
      added.chain = index_->TakeRoot(options.salt, root);
    } while (!added.chain && EvictForIndex());
    PublishFullPages(added, committed);
  }
  ++counts_.imports;
  *image = SequenceImage();
  return {.ok = true};
}

void KvCache::ImportPages(size_t group, const SequenceImage& image,
                          const std::vector<PrefixNodeId>& found,
                          Sequence* out) {
  GroupState& state = out->groups[group];
  PagePool& pages = *pools_[group];
  const ImageGroupShape& shape = image.shape.groups[group];
  const std::vector<PagePin>& from = image.pages[group];
  const int64_t next_slot =
      shape.first_page * config_.page_tokens + shape.physical_tokens;
  const auto page_of = [&](int64_t entry) {
    return entry < static_cast<int64_t>(found.size())
               ? index_->page(found[static_cast<size_t>(entry)],
                              group_id(group))
               : PageId();
  };
  // All that is shared is held before anything is allocated: an allocation may
  // take a cached page.
  std::vector<PagePin> shared(static_cast<size_t>(shape.num_pages));
  for (int64_t i = 0; i < shape.num_pages; ++i) {
    const PageId page = page_of(shape.first_page + i);
    if (page.valid()) shared[static_cast<size_t>(i)] = pages.Share(page);
  }
  const auto copy_in = [&](int64_t i) {
    PagePin page = AllocatePage(group_id(group));
    ListCopy(group, from[static_cast<size_t>(i)].page(), page.page())
        .set_from_host(true);
    counts_.bytes_imported += config_.groups[group].page_bytes;
    return page;
  };
  state.table.AppendReleased(shape.first_page);
  for (int64_t i = 0; i < shape.num_pages; ++i) {
    PagePin& page = shared[static_cast<size_t>(i)];
    if (!page) {
      page = copy_in(i);
      const int64_t begin = (shape.first_page + i) * config_.page_tokens;
      const int64_t filled = std::min(next_slot - begin, config_.page_tokens);
      pages.SetFilledSlots(page.page(), static_cast<int32_t>(filled));
    }
    state.table.Append(std::move(page));
  }
  for (int64_t i = 0; i < shape.num_side_pages; ++i) {
    state.side_pages.push_back(copy_in(shape.num_pages + i));
  }
  state.table.SetLengths(image.shape.logical_tokens, next_slot);
}

absl::Status KvCache::CheckShape(const ImageShape& shape,
                                 const StartOptions& options) const {
  if (shape.groups.size() != pools_.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "image: ", shape.groups.size(), " page groups, want ", pools_.size()));
  }
  if (shape.logical_tokens < 0 || shape.logical_tokens > kMaxSequenceTokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("image: ", shape.logical_tokens, " tokens, want 0 to ",
                     kMaxSequenceTokens));
  }
  int64_t prompt_tokens = 0;
  for (size_t g = 0; g < pools_.size(); ++g) {
    const EvictionSchedule eviction = ScheduleOf(g, {}, options);
    prompt_tokens = std::max(prompt_tokens, eviction.prompt_tokens());
    const int64_t first = FirstVisibleToken(config_.groups[g].sliding_window,
                                            shape.logical_tokens) /
                          config_.page_tokens;
    const ImageGroupShape& have = shape.groups[g];
    int64_t slots = shape.logical_tokens - first * config_.page_tokens;
    if (eviction.kept_slots() > 0) {
      // At a point, slots may have gone or may still be to go.
      slots = eviction.SlotsBefore(shape.logical_tokens);
      if (have.physical_tokens != slots) {
        slots = eviction.SlotsAfter(shape.logical_tokens);
      }
    }
    const ImageGroupShape want = {
        .physical_tokens = slots,
        .first_page = first,
        .num_pages = CeilDiv(slots, config_.page_tokens),
        .num_side_pages = shape.logical_tokens > 0
                              ? config_.groups[g].side_pages_per_sequence
                              : 0,
        .kept_slots = eviction.kept_slots()};
    if (have == want) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "image: page group ", g, " with ", shape.logical_tokens,
        " tokens seen: ", have.physical_tokens, " slots in ", have.num_pages,
        " pages from ", have.first_page, " on, ", have.num_side_pages,
        " side pages and a budget of ", have.kept_slots, " slots, want ",
        want.physical_tokens, ", ", want.num_pages, ", ", want.first_page, ", ",
        want.num_side_pages, ", ", want.kept_slots));
  }
  if (shape.prompt_tokens == prompt_tokens) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("image: gives up slots by a prompt of ", shape.prompt_tokens,
                   " tokens, want ", prompt_tokens));
}

absl::StatusOr<SequenceImage> KvCache::TakeImagePages(
    const ImageShape& shape, const StartOptions& options) {
  KVASIR_RETURN_IF_ERROR(CheckShape(shape, options));
  for (const kvasir::v1::PageCopy& copy : pending_copies_) {
    if (!copy.from_host() && !copy.to_host()) continue;
    return absl::FailedPreconditionError(
        "image: the next step copies pages of the host pool, which may be "
        "these");
  }
  SequenceImage image;
  image.shape = shape;
  if (AllocateHostPages(&image)) return image;
  return absl::ResourceExhaustedError(
      absl::StrCat("image: ", ImageBytes(shape),
                   " bytes of pages do not fit into the host pool now"));
}

}  // namespace kvasir::cache
