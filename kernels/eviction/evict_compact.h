// evict_compact: moves the data of the slots that a sequence keeps to its first
// slots, in order. C++17.
#pragma once

#include <cstdint>

#include "kernels/eviction/evict_select.h"
#include "kernels/latents/latent_view.h"

namespace kvasir::kernels {

// One kind of data that every slot stores for one unit (a set of KV heads that
// evict the same tokens): the codes of a group, or the entry in a metadata
// plane.
template <template <typename> class Ptr>
struct EvictRegionIn {
  Ptr<void> arena = nullptr;  // [N, page_bytes]
  int64_t page_bytes = 0;
  int64_t tile_bytes = 0;
  int64_t tile_slots = 0;
  TileRegion region;
  int64_t slot_bytes = 0;
  int64_t unit = 0;
};
using EvictRegion = EvictRegionIn<DevicePtr>;
using EvictRegionArgs = EvictRegionIn<LaunchPtr>;

// For every eviction and region, copies slot kept_slots[unit, i] of block_table
// to slot i of to_table, for i = 0, 1, ..., k - 1. kept_slots is in ascending
// order, so no slot is overwritten before it is read, even if both tables have
// the same pages. Slots from index k on are unchanged.
template <template <typename> class Ptr>
struct EvictCompactParamsIn {
  Ptr<const EvictRegionIn<Ptr>> regions = nullptr;
  int64_t num_regions = 0;
  int64_t page_tokens = 0;  // P
  Ptr<const Eviction> evictions = nullptr;
  int64_t num_evictions = 0;
  Ptr<const int32_t> kept_slots = nullptr;  // [units, k] for each eviction

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(regions, evictions, kept_slots);
  }
};
using EvictCompactParams = EvictCompactParamsIn<DevicePtr>;
using EvictCompactArgs = EvictCompactParamsIn<LaunchPtr>;

class CpuStream;
// Copies one slot at a time, on one thread.
void EvictCompactReference(const EvictCompactArgs& params, CpuStream& stream);
// Divides the regions among threads. Slots that are adjacent before and after
// the move are copied together.
void EvictCompactCpu(const EvictCompactArgs& params, CpuStream& stream);

}  // namespace kvasir::kernels
