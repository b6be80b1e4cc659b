#include "kernels/eviction/evict_compact.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/device/dispatch.h"
#include "kernels/device/parallel.h"
#include "kernels/eviction/ops.h"
#include "kernels/latents/latent_check.h"

namespace kvasir::kernels {
namespace {

constexpr OpKernels<EvictCompactParams> kKernels = {
    "evict_compact", &EvictCompactReference, &EvictCompactCpu};

// Moves the slots of one eviction in one region.
class Mover {
 public:
  Mover(const EvictCompactArgs& params, const Eviction& eviction,
        const EvictRegionArgs& region)
      : region_(region),
        page_tokens_(params.page_tokens),
        from_(eviction.block_table.device_address()),
        to_(eviction.to_table.device_address()),
        kept_(params.kept_slots + eviction.first_kept +
              region.unit * eviction.kept),
        count_(eviction.kept) {}

  void MoveSlots() const {
    for (int64_t i = 0; i < count_; ++i) Move(i, 1);
  }
  // Moves the slots in runs: slots that are adjacent in a tile, both before and
  // after the move, are copied together.
  void MoveRuns() const {
    for (int64_t i = 0; i < count_;) {
      const int64_t slots = region_.tile_slots;
      const int64_t most =
          std::min({count_ - i, slots - i % slots, slots - kept_[i] % slots});
      int64_t run = 1;
      while (run < most && kept_[i + run] == kept_[i] + run) ++run;
      Move(i, run);
      i += run;
    }
  }

 private:
  char* AddressOf(const int32_t* table, int64_t slot) const {
    const int64_t page = table[slot / page_tokens_];
    const int64_t in_page = slot % page_tokens_;
    const int64_t tile = in_page / region_.tile_slots;
    return static_cast<char*>(region_.arena) + page * region_.page_bytes +
           tile * region_.tile_bytes + region_.region.offset_bytes +
           (in_page - tile * region_.tile_slots) * region_.region.stride_bytes;
  }

  // Moves `run` slots to slots [i, i + run). Source and destination may
  // overlap.
  void Move(int64_t i, int64_t run) const {
    const char* from = AddressOf(from_, kept_[i]);
    char* to = AddressOf(to_, i);
    if (from == to) return;
    const int64_t stride = region_.region.stride_bytes;
    const int64_t granule = region_.region.granule_bytes;
    const int64_t piece = granule > 0 ? granule : region_.slot_bytes;
    for (int64_t b = 0; b < region_.slot_bytes; b += piece) {
      const int64_t at = b * region_.tile_slots * (granule > 0 ? 1 : 0);
      std::memmove(to + at, from + at,
                   static_cast<size_t>((run - 1) * stride + piece));
    }
  }

  const EvictRegionArgs& region_;
  const int64_t page_tokens_;
  const int32_t* const from_;
  const int32_t* const to_;
  const int32_t* const kept_;
  const int64_t count_;
};

class RegionTable {
 public:
  explicit RegionTable(const SlotMetadata& metadata) : metadata_(metadata) {}

  void AddPlane(int64_t offset, int64_t number_bytes) {
    for (int64_t unit = 0; offset >= 0 && unit < metadata_.num_units; ++unit) {
      EvictRegion region;
      region.arena = metadata_.arena;
      region.page_bytes = metadata_.page_bytes;
      region.tile_slots = metadata_.page_tokens;
      region.region.offset_bytes =
          offset + unit * metadata_.page_tokens * number_bytes;
      region.region.stride_bytes = number_bytes;
      region.slot_bytes = number_bytes;
      region.unit = unit;
      regions.push_back(region);
    }
  }
  void AddGroups(const EvictPart& from) {
    const LatentPart& part = from.latents;
    for (int64_t g = 0; g < part.num_groups; ++g) {
      const LatentGroup& group = part.groups[g];
      Add(part, group.codes, CodesBytes(part, group), from.unit_of_group[g]);
      if (group.num_runs == 0) continue;
      Add(part, group.params, ParamsBytes(part, group), from.unit_of_group[g]);
    }
  }

  std::vector<EvictRegion> regions;

 private:
  void Add(const LatentPart& part, const TileRegion& region, int64_t slot_bytes,
           int64_t unit) {
    if (slot_bytes == 0) return;
    regions.push_back({part.arena, part.page_bytes, part.tile_bytes,
                       part.tile_slots, region, slot_bytes, unit});
  }

  const SlotMetadata& metadata_;
};

}  // namespace

void EvictCompactReference(const EvictCompactArgs& params, CpuStream&) {
  for (int64_t i = 0; i < params.num_evictions; ++i) {
    for (int64_t r = 0; r < params.num_regions; ++r) {
      Mover(params, params.evictions[i], params.regions[r]).MoveSlots();
    }
  }
}

void EvictCompactCpu(const EvictCompactArgs& params, CpuStream& stream) {
  // The work per region that is reported to ForRows, chosen so that ForRows
  // wakes other threads for four regions or more.
  constexpr int64_t kNumbersPerRegion = 4096;
  ForRows(stream, params.num_evictions * params.num_regions, kNumbersPerRegion,
          [&](int64_t begin, int64_t end, int /*thread*/) {
            for (int64_t i = begin; i < end; ++i) {
              Mover(params, params.evictions[i / params.num_regions],
                    params.regions[i % params.num_regions])
                  .MoveRuns();
            }
          });
}

absl::StatusOr<PreparedEviction> Prepare(Device& device,
                                         const SlotMetadata& metadata,
                                         absl::Span<const EvictPart> parts) {
  KVASIR_RETURN_IF_ERROR(
      CheckSlotMetadata(kKernels.op, metadata, metadata.page_tokens));
  device.CheckMemory(kKernels.op, metadata.arena);
  RegionTable table(metadata);
  table.AddPlane(metadata.scores_offset, sizeof(float));
  table.AddPlane(metadata.positions_offset, sizeof(uint32_t));
  for (const int64_t offset : metadata.error_offset) table.AddPlane(offset, 1);
  for (const EvictPart& part : parts) {
    KVASIR_RETURN_IF_ERROR(CheckLatentPart(kKernels.op, part.latents,
                                           metadata.page_tokens,
                                           device.page_granule_bytes()));
    device.CheckMemory(kKernels.op, part.latents.arena);
    for (int64_t g = 0; g < part.latents.num_groups; ++g) {
      const int64_t unit = part.unit_of_group[g];
      if (unit >= 0 && unit < metadata.num_units) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          kKernels.op, ": group ", g, " belongs to eviction unit ", unit,
          ", but the units are numbered from 0 to ", metadata.num_units - 1));
    }
    table.AddGroups(part);
  }
  PreparedEviction prepared(&device);
  prepared.metadata = metadata;
  prepared.compact.page_tokens = metadata.page_tokens;
  prepared.compact.num_regions = static_cast<int64_t>(table.regions.size());
  KVASIR_ASSIGN_OR_RETURN(prepared.compact.regions,
                          prepared.tables.Add<EvictRegion>(table.regions));
  return prepared;
}

absl::Status EvictCompact(Stream& stream, const PreparedEviction& prepared,
                          const EvictionRows& rows, Workspace& workspace) {
  if (rows.num_evictions < 0) {
    return Refuse(kKernels.op, "evictions", 0, rows.num_evictions);
  }
  if (workspace.counting()) return CheckServed(kKernels, stream);
  EvictCompactParams params = prepared.compact;
  params.evictions = rows.evictions;
  params.num_evictions = rows.num_evictions;
  params.kept_slots = rows.kept_slots;
  return Launch(kKernels, stream, params);
}

}  // namespace kvasir::kernels
