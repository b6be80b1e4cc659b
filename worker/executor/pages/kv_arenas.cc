#include "worker/executor/pages/kv_arenas.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/device/read_back.h"
#include "kernels/latents/ops.h"
#include "plan/resolved_plan.h"

namespace kvasir::worker {
namespace {

constexpr kernels::DType kExactType = kernels::DType::kBf16;

absl::StatusOr<kernels::DType> StoredType(kvasir::v1::DataType dtype) {
  switch (dtype) {
    case kvasir::v1::F32:
      return kernels::DType::kF32;
    case kvasir::v1::F16:
      return kernels::DType::kF16;
    case kvasir::v1::BF16:
      return kernels::DType::kBf16;
    default:
      return absl::UnimplementedError(
          absl::StrCat("cache: this build stores numbers as F32, F16 or BF16, "
                       "not as DataType ",
                       static_cast<int>(dtype)));
  }
}

// Divides a latent's channels into runs with the same code width. If ranges are
// stored per token, the channels of a run also share a range.
std::vector<kernels::CodeRun> CodeRuns(const plan::ResolvedPart& part,
                                       const plan::ResolvedLatent& latent) {
  std::vector<kernels::CodeRun> runs;
  for (const plan::CodeRun& run : latent.runs) {
    const int64_t width =
        part.range_channels > 0 ? part.range_channels : run.width;
    for (int64_t at = 0; at < run.width; at += width) {
      runs.push_back({run.begin + at, width, run.bits});
    }
  }
  return runs;
}

// Adds the part's view of exact rows: the same latent groups, stored
// uncompressed (as bfloat16).
void AddExactView(const cache::PartLayout& layout, int64_t row_bytes,
                  KvArenas::Part* part) {
  for (size_t g = 0; g < part->groups.size(); ++g) {
    kernels::LatentGroup group;
    group.width = part->groups[g].width;
    group.column = part->groups[g].column;
    group.codes.offset_bytes = layout.groups[g].exact_offset_bytes;
    group.codes.stride_bytes = group.width * kernels::DTypeBytes(kExactType);
    part->exact_groups.push_back(group);
  }
  part->exact.dtype = kExactType;
  part->exact.page_bytes = part->exact.tile_bytes = row_bytes;
  part->exact.tile_slots = 1;
  part->exact.groups = part->exact_groups.data();
  part->exact.num_groups = part->latents.num_groups;
}

// The first arena that contains any of these exact rows. Offsets are relative
// to this arena, so that they are never negative.
size_t FirstArena(const cache::ExactRing& rows) {
  return static_cast<size_t>(
      std::min_element(
          rows.segments.begin(), rows.segments.end(),
          [](const auto& a, const auto& b) { return a.layer < b.layer; })
          ->layer);
}

kernels::TileRegion RegionView(const cache::Region& region,
                               int64_t granule_bytes) {
  if (region.num_slots == 0) return {};
  return {region.offset_bytes,
          granule_bytes > 0 ? granule_bytes : region.slot_bytes, granule_bytes};
}

// Makes a part's view. The caller must set where its pages are.
absl::StatusOr<KvArenas::Part> PartView(const cache::PartLayout& layout,
                                        const plan::ResolvedPart& resolved,
                                        const cache::PageLayout& pages) {
  KvArenas::Part part;
  part.of_keys = layout.of_keys;
  if (resolved.range == plan::RangeKind::kNone) {
    KVASIR_ASSIGN_OR_RETURN(part.latents.dtype, StoredType(resolved.dtype));
  } else if (resolved.range == plan::RangeKind::kToken ||
             resolved.range == plan::RangeKind::kTokenNorm) {
    KVASIR_ASSIGN_OR_RETURN(part.latents.param_dtype,
                            StoredType(resolved.param_dtype));
  }
  part.latents.num_levels = static_cast<int>(resolved.levels.size());
  std::copy_n(resolved.levels.begin(),
              std::min<size_t>(resolved.levels.size(), kernels::kMaxNormLevels),
              part.latents.levels);
  int64_t column = 0;
  for (const cache::GroupLayout& from : layout.groups) {
    const plan::ResolvedLatent& latent =
        resolved.latents[static_cast<size_t>(from.latent)];
    const std::vector<kernels::CodeRun>& runs =
        part.runs.emplace_back(CodeRuns(resolved, latent));
    kernels::LatentGroup group;
    group.width = latent.channels;
    group.column = column;
    group.codes = RegionView(from.codes, pages.granule_bytes());
    group.params = RegionView(from.params, pages.param_granule_bytes());
    // The pointer stays valid when `part.runs` grows, because a moved vector
    // keeps its memory.
    group.runs = runs.data();
    group.num_runs = static_cast<int64_t>(runs.size());
    column += group.width;
    part.groups.push_back(group);
  }
  part.latents.groups = part.groups.data();
  part.latents.num_groups = static_cast<int64_t>(part.groups.size());
  return part;
}

// Numbers a layer's eviction units that have heads on this rank, and finds the
// unit of a head.
class RankUnits {
 public:
  RankUnits(const plan::ResolvedEviction& eviction, plan::HeadRange heads) {
    for (const std::vector<int64_t>& unit : eviction.units) {
      const bool is_here =
          std::any_of(unit.begin(), unit.end(),
                      [heads](int64_t head) { return heads.Contains(head); });
      if (!is_here) continue;
      for (const int64_t head : unit) unit_of_head_[head] = count_;
      ++count_;
    }
  }
  int32_t UnitOf(int64_t head) const { return unit_of_head_.at(head); }

 private:
  absl::flat_hash_map<int64_t, int32_t> unit_of_head_;
  int32_t count_ = 0;
};

void AddUnits(const plan::ResolvedPlan& plan,
              const plan::ResolvedEviction& eviction,
              const cache::LayerLayout& layout, KvArenas::Layer* layer) {
  const RankUnits units(eviction, plan.kv_heads);
  for (int64_t head = 0; head < plan.kv_heads.count; ++head) {
    layer->unit_of_head.push_back(units.UnitOf(plan.kv_heads.first + head));
  }
  for (const plan::Side side : {plan::Side::kKey, plan::Side::kValue}) {
    const std::vector<cache::PartLayout>& parts = layout.side(side).parts;
    for (size_t p = 0; p < parts.size(); ++p) {
      KvArenas::Part& part =
          (side == plan::Side::kKey ? layer->key : layer->value)[p];
      // All heads of a latent group belong to the same eviction unit.
      for (const cache::GroupLayout& group : parts[p].groups) {
        part.unit_of_group.push_back(units.UnitOf(group.heads.front()));
      }
    }
  }
}

kernels::SlotMetadata MetadataView(const cache::PageLayout& layout,
                                   const cache::LayerLayout& layer,
                                   kernels::DevicePtr<void> arena) {
  const cache::SlotMetadataLayout& from = layer.slot_metadata;
  kernels::SlotMetadata metadata;
  metadata.arena = arena;
  metadata.page_bytes = layer.page_bytes;
  metadata.page_tokens = layout.page_tokens();
  metadata.num_units = from.num_units;
  metadata.scores_offset = from.scores.offset_bytes;
  metadata.positions_offset = from.positions.offset_bytes;
  const auto errors = [](const cache::Region& region) {
    return region.num_slots == 0 ? int64_t{-1} : region.offset_bytes;
  };
  metadata.error_offset[kernels::kKeyError] = errors(from.key_errors);
  metadata.error_offset[kernels::kValueError] = errors(from.value_errors);
  return metadata;
}

}  // namespace

absl::StatusOr<KvArenas> KvArenas::Create(const plan::ResolvedPlan& plan,
                                          const cache::PageLayout& layout,
                                          const cache::PageCounts& pages,
                                          kernels::DeviceAllocator* allocator,
                                          const cache::PageCounts& host_pages) {
  KvArenas arenas;
  arenas.pages_ = pages;
  arenas.page_bytes_.resize(pages.size());
  arenas.evicts_.resize(pages.size());
  arenas.host_pages_ = host_pages;
  arenas.host_pages_.resize(pages.size());
  if (pages.size() != layout.page_groups().size() ||
      host_pages.size() > pages.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "cache: the page layout has ", layout.page_groups().size(),
        " page groups, but page counts were given for ", pages.size(),
        " page groups, and for ", host_pages.size(), " in the host pool"));
  }
  int64_t bytes = 0;
  for (const cache::LayerLayout& layer : layout.layers()) {
    const auto group = static_cast<size_t>(layer.page_group.value());
    if (pages[group] < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("cache: page group ", group, " has no pages"));
    }
    arenas.page_bytes_[group] += layer.page_bytes;
    arenas.bytes_per_token_ += static_cast<double>(layer.page_bytes) /
                               static_cast<double>(layout.page_tokens());
    arenas.arena_offsets_.push_back(bytes);
    bytes += layer.page_bytes * pages[group];
    KVASIR_ASSIGN_OR_RETURN(
        kernels::DeviceBuffer host,
        allocator->Allocate(
            static_cast<size_t>(layer.page_bytes * arenas.host_pages_[group]),
            kernels::MemoryTag::kHostPool,
            {.alignment_bytes = cache::kRegionAlignmentBytes,
             .prefault = true}));
    arenas.host_buffers_.push_back(std::move(host));
  }
  KVASIR_ASSIGN_OR_RETURN(
      arenas.memory_,
      allocator->Allocate(
          static_cast<size_t>(bytes), kernels::MemoryTag::kKvCache,
          {.alignment_bytes = cache::kRegionAlignmentBytes, .prefault = true}));
  for (size_t index = 0; index < layout.layers().size(); ++index) {
    const cache::LayerLayout& layer = layout.layers()[index];
    Layer out;
    out.page_group = layer.page_group.value();
    for (const plan::Side which : {plan::Side::kKey, plan::Side::kValue}) {
      const plan::ResolvedSide& side =
          plan.attention_of(static_cast<int64_t>(index)).side(which);
      const cache::SideLayout& laid = layer.side(which);
      for (const cache::PartLayout& part : laid.parts) {
        KVASIR_ASSIGN_OR_RETURN(
            Part view,
            PartView(part, side.parts[static_cast<size_t>(part.part_index)],
                     layout));
        view.latents.arena = arenas.arena(index);
        view.latents.page_bytes = layer.page_bytes;
        view.latents.tile_bytes = layer.tile_bytes;
        view.latents.tile_slots = layout.tile_slots();
        if (laid.exact.any()) {
          AddExactView(part, laid.exact.row_bytes, &view);
          view.exact.arena = arenas.arena(FirstArena(laid.exact));
        }
        (which == plan::Side::kKey ? out.key : out.value)
            .push_back(std::move(view));
      }
    }
    out.key_ring = arenas.RingOf(layout, out.page_group, layer.key.exact);
    out.value_ring = arenas.RingOf(layout, out.page_group, layer.value.exact);
    const auto& eviction = plan.layer(static_cast<int64_t>(index)).eviction;
    if (eviction.has_value()) {
      arenas.evicts_[static_cast<size_t>(out.page_group)] = true;
      AddUnits(plan, *eviction, layer, &out);
      out.metadata = MetadataView(layout, layer, arenas.arena(index));
    }
    arenas.layers_.push_back(std::move(out));
  }
  return arenas;
}

int64_t KvArenas::RingOf(const cache::PageLayout& layout, int64_t page_group,
                         const cache::ExactRing& rows) {
  if (!rows.any()) return -1;
  Ring ring{
      page_group, rows.sink_tokens, rows.window_tokens, rows.row_bytes, {}};
  const int64_t first = arena_offsets_[FirstArena(rows)];
  for (const cache::ExactSegment& segment : rows.segments) {
    ring.segments.push_back(
        {.first_row = segment.first_row,
         .first_page = segment.first_page,
         .rows_per_page = segment.rows_per_page,
         .arena_bytes =
             arena_offsets_[static_cast<size_t>(segment.layer)] - first,
         .page_bytes = layout.layer(segment.layer).page_bytes,
         .offset_bytes = segment.offset_bytes});
  }
  const auto found = std::find(rings_.begin(), rings_.end(), ring);
  const auto index = static_cast<int64_t>(found - rings_.begin());
  if (found == rings_.end()) rings_.push_back(ring);
  return index;
}

absl::Status KvArenas::CheckPage(uint32_t page_group, int32_t page) const {
  if (page_group >= pages_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("page group ", page_group, " does not exist: there are ",
                     pages_.size(), " groups"));
  }
  if (page < 0 || page >= pages_[page_group]) {
    return absl::InvalidArgumentError(absl::StrCat(
        "page ", page, " of group ", page_group, " is outside of the pool of ",
        pages_[page_group], " pages"));
  }
  return absl::OkStatus();
}

absl::Status KvArenas::CheckHostPage(uint32_t page_group, int32_t page) const {
  const int64_t count =
      page_group < host_pages_.size() ? host_pages_[page_group] : 0;
  if (page >= 0 && page < count) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("page ", page, " of group ", page_group,
                   " is outside of the host pool of ", count, " pages"));
}

template <typename Visit>
absl::Status KvArenas::ForHostPages(int64_t group,
                                    absl::Span<const int32_t> pages,
                                    size_t num_bytes,
                                    const Visit& visit) const {
  for (const int32_t page : pages) {
    KVASIR_RETURN_IF_ERROR(CheckHostPage(static_cast<uint32_t>(group), page));
  }
  const size_t want =
      pages.empty() ? 0 : pages.size() * static_cast<size_t>(page_bytes(group));
  if (num_bytes != want) {
    return absl::InvalidArgumentError(absl::StrCat(
        pages.size(), " host pages of page group ", group, " have ", want,
        " bytes, but the caller's buffer has ", num_bytes));
  }
  size_t at = 0;
  for (const int32_t page : pages) {
    for (size_t layer = 0; layer < layers_.size(); ++layer) {
      if (layers_[layer].page_group != group) continue;
      const int64_t bytes = layers_[layer].key.front().latents.page_bytes;
      KVASIR_RETURN_IF_ERROR(visit(
          (host_buffers_[layer].as<char>() + page * bytes).template as<void>(),
          at, static_cast<size_t>(bytes)));
      at += static_cast<size_t>(bytes);
    }
  }
  return absl::OkStatus();
}

absl::Status KvArenas::ReadHostPages(kernels::Stream& stream, int64_t group,
                                     absl::Span<const int32_t> pages,
                                     absl::Span<char> bytes) const {
  return ForHostPages(
      group, pages, bytes.size(),
      [&](kernels::DevicePtr<void> from, size_t at, size_t count) {
        return kernels::ReadBack(stream, bytes.data() + at, from, count);
      });
}

absl::Status KvArenas::WriteHostPages(kernels::Stream& stream, int64_t group,
                                      absl::Span<const int32_t> pages,
                                      absl::Span<const char> bytes) const {
  return ForHostPages(
      group, pages, bytes.size(),
      [&](kernels::DevicePtr<void> to, size_t at, size_t count) {
        return kernels::Upload(stream, to, bytes.data() + at, count);
      });
}

absl::StatusOr<std::vector<uint32_t>> KvArenas::ReadPositions(
    kernels::Stream& stream, int64_t layer, absl::Span<const int32_t> pages,
    int64_t num_slots) const {
  const auto count = static_cast<int64_t>(layers_.size());
  if (layer < 0 || layer >= count) {
    return absl::InvalidArgumentError(
        absl::StrCat("positions of slots: layer ", layer,
                     " does not exist: there are ", count, " layers"));
  }
  const Layer& evicting = layers_[static_cast<size_t>(layer)];
  const kernels::SlotMetadata& metadata = evicting.metadata;
  if (metadata.num_units == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("positions of slots: layer ", layer,
                     " evicts nothing, so it stores no positions"));
  }
  const auto num_pages = static_cast<int64_t>(pages.size());
  if (num_slots < 0 || num_slots > num_pages * metadata.page_tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("positions of slots: the caller asked for ", num_slots,
                     " slots, but gave ", num_pages, " pages of ",
                     metadata.page_tokens, " slots"));
  }
  std::vector<uint32_t> positions;
  positions.resize(static_cast<size_t>(metadata.num_units * num_slots));
  for (int64_t first = 0; first < num_slots; first += metadata.page_tokens) {
    const int32_t page =
        pages[static_cast<size_t>(first / metadata.page_tokens)];
    KVASIR_RETURN_IF_ERROR(
        CheckPage(static_cast<uint32_t>(evicting.page_group), page));
    const auto bytes =
        static_cast<size_t>(std::min(metadata.page_tokens, num_slots - first)) *
        sizeof(uint32_t);
    for (int64_t unit = 0; unit < metadata.num_units; ++unit) {
      const int64_t plane =
          page * metadata.page_bytes + metadata.positions_offset +
          unit * metadata.page_tokens * static_cast<int64_t>(sizeof(uint32_t));
      KVASIR_RETURN_IF_ERROR(kernels::ReadBack(
          stream, &positions[static_cast<size_t>(unit * num_slots + first)],
          kernels::OffsetBytes(metadata.arena, plane), bytes));
    }
  }
  return positions;
}

absl::Status KvArenas::CheckCopy(const kvasir::v1::PageCopy& copy) const {
  if (copy.from_host() && copy.to_host()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "page copy from page ", copy.from_page(), " to page ", copy.to_page(),
        ": both pages are in the host pool; a copy within it is not "
        "supported"));
  }
  const auto check = [&](bool host, int32_t page) {
    return host ? CheckHostPage(copy.page_group(), page)
                : CheckPage(copy.page_group(), page);
  };
  KVASIR_RETURN_IF_ERROR(check(copy.from_host(), copy.from_page()));
  return check(copy.to_host(), copy.to_page());
}

absl::Status KvArenas::AddCopies(
    absl::Span<const kvasir::v1::PageCopy* const> copies,
    CopyList* list) const {
  for (const kvasir::v1::PageCopy* const copy : copies) {
    KVASIR_RETURN_IF_ERROR(CheckCopy(*copy));
  }
  const auto fill_up_last = [list] {
    if (list->batches.empty()) return;
    CopyBatch& last = list->batches.back();
    last.count =
        static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(last.count)));
    list->pairs.resize(static_cast<size_t>(last.first + last.count),
                       kernels::PagePair{-1, -1});
  };
  for (int64_t group = 0; group < num_page_groups(); ++group) {
    // The pages that the last batch reads and writes; `true` means a page of
    // the host pool.
    absl::flat_hash_set<std::pair<bool, int32_t>> read;
    absl::flat_hash_set<std::pair<bool, int32_t>> written;
    bool is_open = false;
    for (const kvasir::v1::PageCopy* const each : copies) {
      const kvasir::v1::PageCopy& copy = *each;
      if (copy.page_group() != static_cast<uint32_t>(group)) continue;
      const std::pair from(copy.from_host(), copy.from_page());
      const std::pair to(copy.to_host(), copy.to_page());
      if (from == to) continue;
      const CopyKind kind = copy.to_host()     ? CopyKind::kToHost
                            : copy.from_host() ? CopyKind::kFromHost
                                               : CopyKind::kWithin;
      if (!is_open || list->batches.back().kind != kind ||
          written.contains(from) || written.contains(to) || read.contains(to)) {
        fill_up_last();
        list->batches.push_back(
            {group, kind, static_cast<int64_t>(list->pairs.size()), 0});
        read.clear();
        written.clear();
        is_open = true;
      }
      ++list->batches.back().count;
      list->pairs.push_back({copy.from_page(), copy.to_page()});
      read.insert(from);
      written.insert(to);
    }
  }
  fill_up_last();
  return absl::OkStatus();
}

absl::Status KvArenas::Copy(kernels::Stream& stream, const CopyBatch& batch,
                            kernels::DevicePtr<const kernels::PagePair> pairs,
                            kernels::Workspace& workspace) const {
  for (size_t layer = 0; layer < layers_.size(); ++layer) {
    if (layers_[layer].page_group != batch.page_group) continue;
    const kernels::DevicePtr<void> pool = arena(layer);
    const kernels::DevicePtr<void> host = host_buffers_[layer].data();
    kernels::CopyPagesParams params;
    params.from = batch.kind == CopyKind::kFromHost ? host : pool;
    params.to = batch.kind == CopyKind::kToHost ? host : pool;
    params.page_bytes = layers_[layer].key.front().latents.page_bytes;
    params.pairs = pairs + batch.first;
    params.num_pairs = batch.count;
    KVASIR_RETURN_IF_ERROR(kernels::CopyPages(stream, params, workspace));
  }
  return absl::OkStatus();
}

}  // namespace kvasir::worker
