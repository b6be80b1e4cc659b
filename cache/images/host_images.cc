#include "cache/images/host_images.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace kvasir::cache {
namespace {

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

HostImages::HostImages(const KvCacheConfig& config, PrefixCache* cache,
                       PageCopies* copies, KvCacheStats* counts)
    : config_(config), cache_(*cache), copies_(*copies), counts_(*counts) {
  for (const KvCacheConfig::Group& group : config.groups) {
    host_pools_.push_back(std::make_unique<PagePool>(group.num_host_pages));
  }
}

ImageShape HostImages::ShapeOf(const SequenceState& sequence) const {
  ImageShape shape;
  shape.logical_tokens = sequence.logical_tokens();
  for (const GroupState& state : sequence.groups) {
    const BlockTable& table = state.table;
    const size_t side = state.side_pages.size() + state.tail_pages.size();
    shape.groups.push_back(
        {.physical_tokens = table.physical_tokens(),
         .first_page = table.first_live(),
         .num_pages = CeilDiv(table.physical_tokens(), config_.page_tokens),
         // If the sequence's first step was reserved but never ran, its side
         // pages hold nothing yet and are left out.
         .num_side_pages =
             shape.logical_tokens > 0 ? static_cast<int64_t>(side) : 0,
         .kept_slots = state.eviction.kept_slots()});
    shape.prompt_tokens =
        std::max(shape.prompt_tokens, state.eviction.prompt_tokens());
  }
  return shape;
}

int64_t HostImages::Bytes(const ImageShape& shape) const {
  int64_t bytes = 0;
  for (size_t g = 0; g < shape.groups.size(); ++g) {
    bytes += (shape.groups[g].num_pages + shape.groups[g].num_side_pages) *
             config_.groups[g].page_bytes;
  }
  return bytes;
}

// Returns false and allocates nothing if too few host pages are free.
bool HostImages::AllocateHostPages(SequenceImage* image) {
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

std::optional<SequenceImage> HostImages::Export(const SequenceState& sequence,
                                                const TailPolicy& tails) {
  SequenceImage image;
  image.shape = ShapeOf(sequence);
  image.tails = tails;
  if (!AllocateHostPages(&image)) return std::nullopt;
  for (size_t g = 0; g < host_pools_.size(); ++g) {
    const GroupState& state = sequence.groups[g];
    const ImageGroupShape& shape = image.shape.groups[g];
    auto to = image.pages[g].begin();
    for (int64_t i = 0; i < shape.num_pages; ++i) {
      const int64_t entry = shape.first_page + i;
      // The table of a fork that has not run ends before its last tokens, which
      // are still in the parent's page.
      const PageId from = entry < state.table.num_entries()
                              ? state.table.page(entry)
                              : state.fork_page.page();
      copies_.ListToHost(GroupIdOf(g), from, (to++)->page());
    }
    if (shape.num_side_pages == 0) continue;
    // A sequence that has not run does not have its own side pages yet. The
    // tail that it found is copied instead.
    for (const PagePin& page :
         state.side_pages.empty() ? state.tail_pages : state.side_pages) {
      copies_.ListToHost(GroupIdOf(g), page.page(), (to++)->page());
    }
  }
  counts_.bytes_exported += Bytes(image.shape);
  ++counts_.exports;
  return image;
}

ReserveResult HostImages::CheckRoom(const SequenceImage& image,
                                    const std::vector<PrefixNodeId>& found,
                                    size_t num_tokens,
                                    const StartOptions& options) const {
  const ImageShape& shape = image.shape;
  const bool runs_more =
      static_cast<int64_t>(num_tokens) > shape.logical_tokens;
  for (size_t g = 0; g < host_pools_.size(); ++g) {
    const ImageGroupShape& group = shape.groups[g];
    const EvictionSchedule eviction =
        ScheduleOf(config_, g, num_tokens, options);
    // The next token needs another page if the last page is full, unless an
    // eviction is due, which frees slots first.
    const bool is_full = group.physical_tokens % config_.page_tokens == 0 &&
                         !(eviction.IsPoint(shape.logical_tokens) &&
                           group.physical_tokens > eviction.kept_slots());
    auto want = static_cast<int64_t>(image.pages[g].size());
    int64_t have = cache_.pool(g).available_pages();
    if (runs_more && is_full) ++want;
    if (runs_more && group.num_side_pages == 0) {
      want += config_.groups[g].side_pages_per_sequence;
    }
    for (int64_t i = group.first_page; i < static_cast<int64_t>(found.size());
         ++i) {
      const PageId page = cache_.page(found[static_cast<size_t>(i)], g);
      if (!page.valid()) continue;
      --want;
      if (cache_.pool(g).references(page) == 0) --have;
    }
    if (want <= have) continue;
    return {.ok = false,
            .group = GroupIdOf(g),
            .want_pages = want,
            .free_pages = have};
  }
  return {.ok = true};
}

void HostImages::Import(const SequenceImage& image,
                        const std::vector<PrefixNodeId>& found,
                        SequenceState* out) {
  for (size_t g = 0; g < host_pools_.size(); ++g) {
    ImportPages(g, image, found, &out->groups[g]);
  }
}

void HostImages::ImportPages(size_t group, const SequenceImage& image,
                             const std::vector<PrefixNodeId>& found,
                             GroupState* out) {
  PagePool& pages = cache_.pool(group);
  const ImageGroupShape& shape = image.shape.groups[group];
  const std::vector<PagePin>& from = image.pages[group];
  const int64_t next_slot =
      shape.first_page * config_.page_tokens + shape.physical_tokens;
  const auto page_of = [&](int64_t entry) {
    return entry < static_cast<int64_t>(found.size())
               ? cache_.page(found[static_cast<size_t>(entry)], group)
               : PageId();
  };
  // References the shared pages before any page is allocated, because an
  // allocation may evict a cached page.
  std::vector<PagePin> shared(static_cast<size_t>(shape.num_pages));
  for (int64_t i = 0; i < shape.num_pages; ++i) {
    const PageId page = page_of(shape.first_page + i);
    if (page.valid()) shared[static_cast<size_t>(i)] = pages.Share(page);
  }
  const auto copy_in = [&](int64_t i) {
    PagePin page = cache_.Allocate(group);
    copies_.ListFromHost(GroupIdOf(group), from[static_cast<size_t>(i)].page(),
                         page.page());
    counts_.bytes_imported += config_.groups[group].page_bytes;
    return page;
  };
  out->table.AppendReleased(shape.first_page);
  for (int64_t i = 0; i < shape.num_pages; ++i) {
    PagePin& page = shared[static_cast<size_t>(i)];
    if (!page) {
      page = copy_in(i);
      const int64_t begin = (shape.first_page + i) * config_.page_tokens;
      const int64_t filled = std::min(next_slot - begin, config_.page_tokens);
      pages.SetFilledSlots(page.page(), static_cast<int32_t>(filled));
    }
    out->table.Append(std::move(page));
  }
  for (int64_t i = 0; i < shape.num_side_pages; ++i) {
    out->side_pages.push_back(copy_in(shape.num_pages + i));
  }
  out->table.SetLengths(image.shape.logical_tokens, next_slot);
}

absl::Status HostImages::CheckShape(const ImageShape& shape,
                                    const StartOptions& options) const {
  if (shape.groups.size() != host_pools_.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "KV cache image: its number of page groups is ", shape.groups.size(),
        ", but this cache has ", host_pools_.size()));
  }
  if (shape.logical_tokens < 0 || shape.logical_tokens > kMaxSequenceTokens) {
    return absl::InvalidArgumentError(absl::StrCat(
        "KV cache image: its number of tokens is ", shape.logical_tokens,
        ", but must be 0 to ", kMaxSequenceTokens));
  }
  int64_t prompt_tokens = 0;
  for (size_t g = 0; g < host_pools_.size(); ++g) {
    const EvictionSchedule eviction = ScheduleOf(config_, g, 0, options);
    prompt_tokens = std::max(prompt_tokens, eviction.prompt_tokens());
    const int64_t first = FirstVisibleToken(config_.groups[g].sliding_window,
                                            shape.logical_tokens) /
                          config_.page_tokens;
    const ImageGroupShape& have = shape.groups[g];
    int64_t slots = shape.logical_tokens - first * config_.page_tokens;
    if (eviction.kept_slots() > 0) {
      // At an eviction point, an image may be made before or after the
      // eviction, so both numbers of slots are accepted.
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
        "KV cache image: page group ", g, " does not fit a sequence of ",
        shape.logical_tokens, " tokens in this cache: it has ",
        have.physical_tokens, " slots (want ", want.physical_tokens, "), ",
        have.num_pages, " pages (want ", want.num_pages, "), first page ",
        have.first_page, " (want ", want.first_page, "), ", have.num_side_pages,
        " side pages (want ", want.num_side_pages,
        ") and an eviction budget of ", have.kept_slots, " slots (want ",
        want.kept_slots, ")"));
  }
  if (shape.prompt_tokens == prompt_tokens) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "KV cache image: its evictions were planned for a prompt of ",
      shape.prompt_tokens, " tokens, but those of this sequence are for ",
      prompt_tokens));
}

absl::StatusOr<SequenceImage> HostImages::TakePages(
    const ImageShape& shape, const StartOptions& options) {
  KVASIR_RETURN_IF_ERROR(CheckShape(shape, options));
  if (copies_.copies_host_pages()) {
    return absl::FailedPreconditionError(
        "KV cache image: the host pool cannot take it, because copies that the "
        "next step makes still use its pages; try again after that step");
  }
  SequenceImage image;
  image.shape = shape;
  if (AllocateHostPages(&image)) return image;
  return absl::ResourceExhaustedError(
      absl::StrCat("KV cache image: its pages take ", Bytes(shape),
                   " bytes, but the host pool has too few free pages now; try "
                   "again when other images have left it"));
}

void HostImages::AddStats(size_t group, PageGroupStats* stats) const {
  const int64_t page_bytes = config_.groups[group].page_bytes;
  stats->host_pages = host_pools_[group]->num_pages();
  stats->host_used_pages = host_pools_[group]->used_pages();
  stats->host_bytes = stats->host_pages * page_bytes;
  stats->host_used_bytes = stats->host_used_pages * page_bytes;
}

}  // namespace kvasir::cache
