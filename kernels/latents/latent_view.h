// The layout of the KV cache's pages as kernels see it. A LatentPart describes
// one part of one side (keys or values) of one layer. C++17.
//
// The cache holds a latent for each token and group of KV heads. A latent is a
// vector that is stored as unquantized numbers of one type, or as codes of few
// bits. In a dense cache each KV head is a group, and its latent is the key or
// value itself.
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
  // 1 to 6 or 8. 0 is allowed only for the last run of a latent with static
  // ranges: nothing is stored for its channels, and each channel decodes to its
  // minimum.
  int bits = 0;
};

// The largest number of levels (LatentPart::levels): codes that stand for
// levels have at most 4 bits.
inline constexpr int kMaxNormLevels = 16;

// The largest granule of the region that holds scales and minima: one 16-bit
// scale and one 16-bit minimum. It does not grow with the device's granule,
// because most of a larger granule would be padding.
inline constexpr int64_t kMostParamGranuleBytes = 4;

// Where a tile stores one kind of data of its slots, for example the codes of a
// group. A tile has S slots. Byte b of slot s is at this offset in the tile:
//   offset_bytes + s * stride_bytes + b                             if g = 0
//   offset_bytes + b / g * g * S + s * stride_bytes + b % g         otherwise
// If granule_bytes (g) is 0, slots follow one another. Otherwise stride_bytes
// is g, and the data of each slot is cut into granules of g bytes. First come
// the first granules of all S slots, then the second granules of all slots, and
// so on.
struct TileRegion {
  int64_t offset_bytes = 0;
  int64_t stride_bytes = 0;
  int64_t granule_bytes = 0;  // g
};

// The layout of the latent of one group. Offsets, strides, granules, tiles and
// pages are multiples of the size of the stored numbers.
struct LatentGroup {
  int64_t width = 0;  // number of channels of the latent, R'
  // The column at which this latent begins in a row that has all latents of the
  // part.
  int64_t column = 0;
  TileRegion codes;  // the codes, or the unquantized numbers
  // Ranges that are stored per token: scale and minimum of run 0, scale and
  // minimum of run 1, and so on, in the part's param_dtype. If the part has
  // levels: only a single scale.
  TileRegion params;
  // The runs, in the order of their channels; together they cover all channels.
  // If there are none, the latent is stored unquantized, in the part's dtype.
  const CodeRun* runs = nullptr;
  int64_t num_runs = 0;
};

// One part: its pages, and the layout of its groups' latents in them. The codes
// of a slot form a stream of bits in four planes, in this order:
//  1. all 8-bit codes;
//  2. 4-bit codes, and the low four bits of 5- and 6-bit codes;
//  3. 2-bit codes, the low two bits of 3-bit codes, and the high two bits of
//     6-bit codes;
//  4. 1-bit codes, and the highest bit of 3- and 5-bit codes.
// Inside a plane, codes are in the order of channels, and bytes are filled from
// the lowest bit. There is no gap between planes, and zeros fill the last byte.
// So a code is found by shifts only. If the number of channels of each run is a
// multiple of 8, runs begin at whole bytes. If a region has granules, this
// stream is cut into granules, and only the last one is padded.
template <template <typename> class Ptr>
struct LatentPartIn {
  Ptr<void> arena = nullptr;  // [N, page_bytes]
  int64_t page_bytes = 0;     // the tiles are at the start of the page
  int64_t tile_bytes = 0;
  int64_t tile_slots = 0;  // S; slot s of a page is in tile s / S
  // [num_groups]: in device memory for a kernel, in host memory for Prepare.
  const LatentGroup* groups = nullptr;
  int64_t num_groups = 0;  // G
  // type of numbers that are stored without codes
  DType dtype = DType::kBf16;
  DType param_dtype = DType::kF16;  // type of the scales and minima in slots
  // Static ranges, one for each channel of the part and the same for all
  // tokens. Null: ranges are stored in slots.
  Ptr<const float> static_scale = nullptr;
  Ptr<const float> static_minimum = nullptr;
  // If num_levels is above 0, code c decodes to levels[c] times the slot's
  // scale. If it is 0, codes have ranges instead of levels. Each level is
  // exactly a common factor times an integer from -127 to 127, and the largest
  // magnitude of these integers is 127. So attention can multiply codes as
  // integers (attention/params/code_digits.h).
  int num_levels = 0;
  float levels[kMaxNormLevels] = {};
};
using LatentPart = LatentPartIn<DevicePtr>;
using LatentPartArgs = LatentPartIn<LaunchPtr>;

// Returns the address of a slot's first byte in a region.
KVASIR_HOST_DEVICE inline char* SlotAddress(const LatentPartArgs& part,
                                            const TileRegion& region,
                                            int64_t page, int64_t slot) {
  // Avoids the slow division if a page has one tile, which is usual.
  const int64_t tile = slot < part.tile_slots ? 0 : slot / part.tile_slots;
  return static_cast<char*>(part.arena) + page * part.page_bytes +
         tile * part.tile_bytes + region.offset_bytes +
         (slot - tile * part.tile_slots) * region.stride_bytes;
}
// Visits the first `bytes` bytes that a slot has in a region. Calls
// visit(address, index of the first byte, number of bytes) for each contiguous
// piece.
template <typename Visit>
void ForSlotBytes(const LatentPartArgs& part, const TileRegion& region,
                  int64_t page, int64_t slot, int64_t bytes,
                  const Visit& visit) {
  if (bytes == 0) return;  // without bytes, the region may be outside the arena
  char* const first = SlotAddress(part, region, page, slot);
  if (region.granule_bytes == 0) return visit(first, int64_t{0}, bytes);
  for (int64_t b = 0; b < bytes; b += region.granule_bytes) {
    visit(first + b * part.tile_slots, b,
          bytes - b < region.granule_bytes ? bytes - b : region.granule_bytes);
  }
}

// Returns the sum of the widths of all latents of a part.
template <template <typename> class Ptr>
KVASIR_HOST_DEVICE int64_t RowWidth(const LatentPartIn<Ptr>& part) {
  int64_t width = 0;
  for (int64_t g = 0; g < part.num_groups; ++g) width += part.groups[g].width;
  return width;
}

// The four planes of a slot's codes, 0 to 3, have 8, 4, 2 and 1 bits per code.
// CodePlanes::begin_bits[p] is the bit of the slot at which plane p begins.
KVASIR_HOST_DEVICE constexpr int PlaneBits(int plane) { return 8 >> plane; }
struct CodePlanes {
  int64_t begin_bits[4] = {0, 0, 0, 0};
  int64_t total_bits = 0;
};
// The index of the plane that has `bits` bits per code.
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
// Returns how many channels of a group have stored codes: those in runs of more
// than 0 bits.
KVASIR_HOST_DEVICE inline int64_t CodedWidth(const LatentGroup& group) {
  const bool rest =
      group.num_runs > 0 && group.runs[group.num_runs - 1].bits == 0;
  return group.width - (rest ? group.runs[group.num_runs - 1].width : 0);
}

// Returns how many bytes a slot's codes or unquantized numbers take.
template <template <typename> class Ptr>
KVASIR_HOST_DEVICE int64_t CodesBytes(const LatentPartIn<Ptr>& part,
                                      const LatentGroup& group) {
  return group.num_runs == 0 ? group.width * DTypeBytes(part.dtype)
                             : (PlanesOf(group).total_bits + 7) / 8;
}
// Returns how many bytes a slot's ranges take.
template <template <typename> class Ptr>
KVASIR_HOST_DEVICE int64_t ParamsBytes(const LatentPartIn<Ptr>& part,
                                       const LatentGroup& group) {
  if (part.static_scale != nullptr) return 0;
  return (part.num_levels > 0 ? 1 : 2 * group.num_runs) *
         DTypeBytes(part.param_dtype);
}

}  // namespace kvasir::kernels
