// Reads latents of any codec from the cache: finds the address of a slot's
// bytes and decodes its numbers. C++17, device code.
#pragma once

#include "kernels/attention/cuda/attention_items.h"
#include "kernels/simt/memory.h"
#include "kernels/simt/numbers.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {

// Where a slot is stored: the address of its tile, and its index in the tile.
struct SlotPlace {
  const char* tile;
  int32_t slot;
  int32_t tile_slots;
};
KVASIR_DEVICE SlotPlace PlaceOf(const LatentPartArgs& part, int64_t page,
                                int64_t slot) {
  const int64_t tile = Quotient(slot, part.tile_slots);
  return {static_cast<const char*>(part.arena) + page * part.page_bytes +
              tile * part.tile_bytes,
          static_cast<int32_t>(slot - tile * part.tile_slots),
          static_cast<int32_t>(part.tile_slots)};
}
// Returns the address of byte `byte` of a slot's data in a region of the tile.
KVASIR_DEVICE const char* ByteOf(const TileRegion& region,
                                 const SlotPlace& place, int64_t byte) {
  const char* const first =
      place.tile + region.offset_bytes + place.slot * region.stride_bytes;
  const int64_t granule = region.granule_bytes;
  if (granule == 0) return first + byte;
  const int64_t in_granule = Remainder(byte, granule);
  return first + (byte - in_granule) * place.tile_slots + in_granule;
}

// Returns where a slot's exact row is stored: among the rows of the launch's
// new tokens, or in the sequence's side pages.
KVASIR_DEVICE SlotPlace ExactPlaceOf(const ExactSlots& exact,
                                     const ExactRowsArgs& rows,
                                     const AttentionSequence& sequence,
                                     int64_t slot) {
  const int64_t fresh = slot - sequence.first_slot;
  if (fresh >= 0) return PlaceOf(rows.fresh, 0, sequence.first_row + fresh);
  const auto* const side_pages =
      simt::BitsAs<const int32_t*>(sequence.side_pages);
  const ExactSlots::Place place =
      exact.PlaceOfRow(exact.RowOf(slot, sequence.evicted), side_pages);
  return {static_cast<const char*>(rows.ring.arena) + place.offset_bytes, 0, 1};
}

// Reads number `index` of a slot from a region of the tile and converts it to
// float32.
KVASIR_DEVICE float NumberOf(DType dtype, const TileRegion& region,
                             const SlotPlace& place, int64_t index) {
  const int64_t bytes = dtype == DType::kF32 ? 4 : 2;
  const char* const at = ByteOf(region, place, index * bytes);
  if (dtype == DType::kF32) {
    return simt::LoadGlobal(reinterpret_cast<const float*>(at));
  }
  const auto bits = simt::LoadGlobal(reinterpret_cast<const uint16_t*>(at));
  return dtype == DType::kF16 ? simt::ToFloat(F16{bits})
                              : simt::ToFloat(Bf16{bits});
}

KVASIR_DEVICE uint32_t CodeBits(const TileRegion& region,
                                const SlotPlace& place, int32_t bit,
                                uint32_t bits) {
  const auto byte =
      static_cast<uint8_t>(simt::LoadGlobal(ByteOf(region, place, bit / 8)));
  return uint32_t{byte} >> (bit % 8) & ((1u << bits) - 1);
}

// Reads channel c of group g in the exact row at `place`.
KVASIR_DEVICE float ExactNumber(const LatentPartArgs& rows, int64_t g,
                                const SlotPlace& place, int64_t c) {
  return NumberOf(rows.dtype, rows.groups[g].codes, place, c);
}

// Decodes channel c of group g in the latent at `place`.
KVASIR_DEVICE float LatentNumber(const DevicePart& part, int64_t g,
                                 const SlotPlace& place, int64_t c) {
  const LatentPartArgs& latents = part.latents;
  const LatentGroup& group = latents.groups[g];
  if (group.num_runs == 0) {
    return NumberOf(latents.dtype, group.codes, place, c);
  }
  const ChannelCode channel = part.channels[part.first_channel[g] + c];
  uint32_t code = 0;
  if (channel.low_bits > 0) {
    code = CodeBits(group.codes, place, channel.low_bit, channel.low_bits);
  }
  if (channel.high_bits > 0) {
    code |= CodeBits(group.codes, place, channel.high_bit, channel.high_bits)
            << channel.low_bits;
  }
  const DType dtype = latents.param_dtype;
  if (latents.num_levels > 0) {
    return latents.levels[code] * NumberOf(dtype, group.params, place, 0);
  }
  if (latents.static_scale != nullptr) {
    return simt::Fma(static_cast<float>(code),
                     latents.static_scale[group.column + c],
                     latents.static_minimum[group.column + c]);
  }
  return simt::Fma(static_cast<float>(code),
                   NumberOf(dtype, group.params, place, 2 * channel.run),
                   NumberOf(dtype, group.params, place, 2 * channel.run + 1));
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
