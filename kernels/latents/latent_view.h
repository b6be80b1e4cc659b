// How the cache's pages look to kernels: one part of one side (keys or values)
// of one layer. C++17.
//
// What is cached of a token and a group of KV heads is a latent: a vector of
// numbers, stored as numbers of one type or as codes of few bits. A dense cache
// is the case of one group per KV head whose latent is the key or value itself.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "kernels/device/device_ptr.h"
#include "kernels/device/dtype.h"

namespace kvasir::kernels {

// Channels [begin, begin + width) of a latent that have codes of the same width
// and, where ranges are a token's own, one scale and one minimum.
struct CodeRun {
  int64_t begin = 0;
  int64_t width = 0;
  // 1 to 6 or 8. 0, in a last run with static ranges: nothing is stored, and
  // each channel is its minimum.
  int bits = 0;
};

// Levels that codes of a token's norm may stand for: codes of 4 bits at most.
inline constexpr int kMaxNormLevels = 16;

// Ranges lie in granules of at most as many bytes, a scale and a minimum of 16
// bits, whatever a device's granule is: few more of each slot would be padding.
inline constexpr int64_t kMostParamGranuleBytes = 4;

// What each slot of a tile has of one kind, the codes of a group say. Byte b of
// slot s lies at
//   offset_bytes + s * stride_bytes + b                             where g = 0
//   offset_bytes + b / g * g * S + s * stride_bytes + b % g         else
// of the tile: slots one after the other, or granules of g bytes of all S slots
// of the tile, then the next granule of all (stride_bytes == g).
struct TileRegion {
  int64_t offset_bytes = 0;
  int64_t stride_bytes = 0;
  int64_t granule_bytes = 0;  // g
};

// The latent of one group. Offsets, strides and granules of numbers, tiles and
// pages that hold them are multiples of their size.
struct LatentGroup {
  int64_t width = 0;  // numbers of the latent, R'
  // Where the latent begins in a row of all latents of the part [sum of R'].
  int64_t column = 0;
  TileRegion codes;  // or numbers
  // Per token ranges: scale, minimum of run 0, scale, minimum of run 1, ...,
  // numbers of the part's param_dtype. With levels: the scale of all, alone.
  TileRegion params;
  // In channel order, together all channels; none: numbers of the part's dtype.
  const CodeRun* runs = nullptr;
  int64_t num_runs = 0;
};

// Codes of a slot. All 8-bit codes come first, then all 4-bit ones and the low
// four bits of 5- and 6-bit ones, then 2-bit codes, the low two bits of 3-bit
// ones and the high two of 6-bit ones, then 1-bit codes and the highest bits of
// 3- and 5-bit ones; inside each of these four planes in channel order, one
// behind the other in a stream of bits (the lowest bit of a byte first),
// without a gap between planes. The last byte is filled up with zeros. (So a
// code is found by shifts alone, whatever its width, and runs of a multiple of
// 8 channels begin at whole bytes.) A region's granules cut this stream; only
// the last one is filled up.
template <template <typename> class Ptr>
struct LatentPartIn {
  Ptr<void> arena = nullptr;  // [N, page_bytes]
  int64_t page_bytes = 0;     // tiles first
  int64_t tile_bytes = 0;
  int64_t tile_slots = 0;  // S: slot s of a page is in its tile s / S
  const LatentGroup* groups = nullptr;  // [num_groups], where the view is
  int64_t num_groups = 0;               // G
  DType dtype = DType::kBf16;           // of numbers
  DType param_dtype = DType::kF16;      // of ranges in slots
  // Ranges that are the channel's own [sum of R']; null: in slots.
  Ptr<const float> static_scale = nullptr;
  Ptr<const float> static_minimum = nullptr;
  // Code c stands for levels[c] times the slot's scale; 0: for c itself.
  int num_levels = 0;
  float levels[kMaxNormLevels] = {};
};
using LatentPart = LatentPartIn<DevicePtr>;
using LatentPartArgs = LatentPartIn<LaunchPtr>;

// The first byte that a slot of a page has in a region.
KVASIR_HOST_DEVICE inline char* SlotAddress(const LatentPartArgs& part,
                                            const TileRegion& region,
                                            int64_t page, int64_t slot) {
  // Most pages have one tile, and a division takes its time.
  const int64_t tile = slot < part.tile_slots ? 0 : slot / part.tile_slots;
  return static_cast<char*>(part.arena) + page * part.page_bytes +
         tile * part.tile_bytes + region.offset_bytes +
         (slot - tile * part.tile_slots) * region.stride_bytes;
}
// Calls visit(address, first byte, bytes) for what lies side by side of the
// first `bytes` bytes that a slot has in a region.
template <typename Visit>
void ForSlotBytes(const LatentPartArgs& part, const TileRegion& region,
                  int64_t page, int64_t slot, int64_t bytes,
                  const Visit& visit) {
  if (bytes == 0) return;  // and no address
  char* const first = SlotAddress(part, region, page, slot);
  if (region.granule_bytes == 0) return visit(first, int64_t{0}, bytes);
  for (int64_t b = 0; b < bytes; b += region.granule_bytes) {
    visit(first + b * part.tile_slots, b,
          bytes - b < region.granule_bytes ? bytes - b : region.granule_bytes);
  }
}

// Numbers of all latents of a part.
template <template <typename> class Ptr>
KVASIR_HOST_DEVICE int64_t RowWidth(const LatentPartIn<Ptr>& part) {
  int64_t width = 0;
  for (int64_t g = 0; g < part.num_groups; ++g) width += part.groups[g].width;
  return width;
}

// Bits before each plane of a slot's codes, and of all codes: planes of 8, 4, 2
// and 1 bits.
KVASIR_HOST_DEVICE constexpr int PlaneBits(int plane) { return 8 >> plane; }
struct CodePlanes {
  int64_t begin_bits[4] = {0, 0, 0, 0};
  int64_t total_bits = 0;
};
// The plane of `bits` bits.
KVASIR_HOST_DEVICE inline int PlaneIndex(int bits) {
  return bits == 8 ? 0 : bits == 4 ? 1 : bits == 2 ? 2 : 3;
}
KVASIR_HOST_DEVICE inline CodePlanes PlanesOf(const LatentGroup& group) {
  CodePlanes planes;
  for (int plane = 0; plane < 4; ++plane) {
    planes.begin_bits[plane] = planes.total_bits;
    for (int64_t r = 0; r < group.num_runs; ++r) {
      const CodeRun& run = group.runs[r];
      planes.total_bits += run.width * (run.bits & PlaneBits(plane));
    }
  }
  return planes;
}
// Channels of a group of codes that have some in a slot.
KVASIR_HOST_DEVICE inline int64_t CodedWidth(const LatentGroup& group) {
  const bool rest =
      group.num_runs > 0 && group.runs[group.num_runs - 1].bits == 0;
  return group.width - (rest ? group.runs[group.num_runs - 1].width : 0);
}

// Bytes of a slot's codes, or numbers.
template <template <typename> class Ptr>
KVASIR_HOST_DEVICE int64_t CodesBytes(const LatentPartIn<Ptr>& part,
                                      const LatentGroup& group) {
  return group.num_runs == 0 ? group.width * DTypeBytes(part.dtype)
                             : (PlanesOf(group).total_bits + 7) / 8;
}
// Bytes of a slot's ranges.
template <template <typename> class Ptr>
KVASIR_HOST_DEVICE int64_t ParamsBytes(const LatentPartIn<Ptr>& part,
                                       const LatentGroup& group) {
  if (part.static_scale != nullptr) return 0;
  return (part.num_levels > 0 ? 1 : 2 * group.num_runs) *
         DTypeBytes(part.param_dtype);
}

}  // namespace kvasir::kernels
