// How kernels see the cache's pages. A view describes one part of one side
// (keys or values) of one layer. C++17.
//
// The cache holds one latent for each token and group of KV heads: a vector of
// numbers, stored as numbers of one type or as codes of few bits. In a dense
// cache each KV head is a group, and its latent is the key or value itself.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "kernels/device/device_ptr.h"
#include "kernels/device/dtype.h"

namespace kvasir::kernels {

// Channels [begin, begin + width) of a latent whose codes have the same number
// of bits. If ranges are stored per token, the channels share one scale and one
// minimum.
struct CodeRun {
  int64_t begin = 0;
  int64_t width = 0;
  // 1 to 6 or 8. 0 is allowed only in a last run with static ranges: nothing is
  // stored, and each channel is its minimum.
  int bits = 0;
};

// The most levels that codes scaled by a token's norm may stand for: such codes
// have at most 4 bits.
inline constexpr int kMaxNormLevels = 16;

// The most bytes of a granule that holds ranges: a scale and a minimum of 16
// bits. It does not grow with the device's granule, because most of a larger
// one would be padding.
inline constexpr int64_t kMostParamGranuleBytes = 4;

// One kind of data that each slot of a tile has, for example the codes of a
// group. Byte b of slot s is at this offset in the tile:
//   offset_bytes + s * stride_bytes + b                             if g = 0
//   offset_bytes + b / g * g * S + s * stride_bytes + b % g         otherwise
// So either slots follow one another, or the first granules of g bytes of all S
// slots come first, then the second granules of all, and so on (stride_bytes ==
// g).
struct TileRegion {
  int64_t offset_bytes = 0;
  int64_t stride_bytes = 0;
  int64_t granule_bytes = 0;  // g
};

// The latent of one group. All offsets, strides and granules are multiples of
// the size of the numbers they hold; so are the sizes of tiles and pages.
struct LatentGroup {
  int64_t width = 0;  // numbers of the latent, R'
  // The first column of the latent in a row of all latents of the part [sum of
  // R'].
  int64_t column = 0;
  TileRegion codes;  // of codes, or of numbers
  // Ranges per token: scale and minimum of run 0, scale and minimum of run 1,
  // ..., as numbers of the part's param_dtype. With levels: only one scale for
  // all.
  TileRegion params;
  // Runs in channel order, which together cover all channels. None: the latent
  // is stored as numbers of the part's dtype.
  const CodeRun* runs = nullptr;
  int64_t num_runs = 0;
};

// One part. The codes of a slot form a stream of bits in four planes, in this
// order:
//  1. all 8-bit codes;
//  2. 4-bit codes, and the low four bits of 5- and 6-bit codes;
//  3. 2-bit codes, the low two bits of 3-bit and the high two of 6-bit codes;
//  4. 1-bit codes, and the highest bit of 3- and 5-bit codes.
// Inside a plane codes are in channel order, the lowest bit of a byte first.
// There is no gap between planes, and zeros fill the last byte. So a code is
// found by shifts only, whatever its width, and runs of a multiple of 8
// channels begin at whole bytes. If a region has granules, they cut this
// stream, and only the last granule is padded.
template <template <typename> class Ptr>
struct LatentPartIn {
  Ptr<void> arena = nullptr;  // [N, page_bytes]
  int64_t page_bytes = 0;     // tiles come first
  int64_t tile_bytes = 0;
  int64_t tile_slots = 0;  // S: slot s of a page is in its tile s / S
  const LatentGroup* groups = nullptr;  // [num_groups], in the memory space of
                                        // the view
  int64_t num_groups = 0;               // G
  DType dtype = DType::kBf16;           // of numbers
  DType param_dtype = DType::kF16;      // of ranges that are stored in slots
  // Ranges of the channels [sum of R'], the same for all tokens. Null: ranges
  // are stored in slots.
  Ptr<const float> static_scale = nullptr;
  Ptr<const float> static_minimum = nullptr;
  // If num_levels > 0, code c stands for levels[c] times the slot's scale. 0:
  // there are no levels.
  int num_levels = 0;
  float levels[kMaxNormLevels] = {};
};
using LatentPart = LatentPartIn<DevicePtr>;
using LatentPartArgs = LatentPartIn<LaunchPtr>;

// The address of the first byte that a slot of a page has in a region.
KVASIR_HOST_DEVICE inline char* SlotAddress(const LatentPartArgs& part,
                                            const TileRegion& region,
                                            int64_t page, int64_t slot) {
  // Most pages have one tile, and a division is slow.
  const int64_t tile = slot < part.tile_slots ? 0 : slot / part.tile_slots;
  return static_cast<char*>(part.arena) + page * part.page_bytes +
         tile * part.tile_bytes + region.offset_bytes +
         (slot - tile * part.tile_slots) * region.stride_bytes;
}
// Visits the first `bytes` bytes of a slot in a region. Calls visit(address,
// index of its first byte, bytes) for each contiguous piece.
template <typename Visit>
void ForSlotBytes(const LatentPartArgs& part, const TileRegion& region,
                  int64_t page, int64_t slot, int64_t bytes,
                  const Visit& visit) {
  if (bytes == 0) return;  // the address may not exist
  char* const first = SlotAddress(part, region, page, slot);
  if (region.granule_bytes == 0) return visit(first, int64_t{0}, bytes);
  for (int64_t b = 0; b < bytes; b += region.granule_bytes) {
    visit(first + b * part.tile_slots, b,
          bytes - b < region.granule_bytes ? bytes - b : region.granule_bytes);
  }
}

// How many numbers all latents of a part have together.
template <template <typename> class Ptr>
KVASIR_HOST_DEVICE int64_t RowWidth(const LatentPartIn<Ptr>& part) {
  int64_t width = 0;
  for (int64_t g = 0; g < part.num_groups; ++g) width += part.groups[g].width;
  return width;
}

// The bits before each plane of a slot's codes, and the bits of all codes. The
// planes have 8, 4, 2 and 1 bits per code.
KVASIR_HOST_DEVICE constexpr int PlaneBits(int plane) { return 8 >> plane; }
struct CodePlanes {
  int64_t begin_bits[4] = {0, 0, 0, 0};
  int64_t total_bits = 0;
};
// The plane that has `bits` bits per code.
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
// How many channels of a group have a code that is stored in a slot.
KVASIR_HOST_DEVICE inline int64_t CodedWidth(const LatentGroup& group) {
  const bool rest =
      group.num_runs > 0 && group.runs[group.num_runs - 1].bits == 0;
  return group.width - (rest ? group.runs[group.num_runs - 1].width : 0);
}

// How many bytes a slot's codes or numbers take.
template <template <typename> class Ptr>
KVASIR_HOST_DEVICE int64_t CodesBytes(const LatentPartIn<Ptr>& part,
                                      const LatentGroup& group) {
  return group.num_runs == 0 ? group.width * DTypeBytes(part.dtype)
                             : (PlanesOf(group).total_bits + 7) / 8;
}
// How many bytes a slot's ranges take.
template <template <typename> class Ptr>
KVASIR_HOST_DEVICE int64_t ParamsBytes(const LatentPartIn<Ptr>& part,
                                       const LatentGroup& group) {
  if (part.static_scale != nullptr) return 0;
  return (part.num_levels > 0 ? 1 : 2 * group.num_runs) *
         DTypeBytes(part.param_dtype);
}

}  // namespace kvasir::kernels
