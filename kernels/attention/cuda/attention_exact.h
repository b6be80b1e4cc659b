// Exact rows in the kernels for tensor cores: which blocks of a split are read
// as codes and which as exact rows, where an exact row is stored, and which
// weights belong to exact rows. C++17, device code.
//
// Some rows of an item may read a block as codes and others as exact rows. One
// row may even read some of the block's slots as codes and the others as exact
// rows. Then both scores of each slot are computed, and each row keeps the
// score of the form that it reads. Values are summed in two passes over a
// split: first decoded values, then exact rows. In each pass, a row's weight is
// 0 for the slots that the row reads in the other form, and adding 0 changes
// nothing. So a row's sum does not depend on what other rows of its item read.
#pragma once

#include "kernels/attention/cuda/attention_items.h"
#include "kernels/attention/cuda/mma_operands.h"
#include "kernels/simt/grid.h"
#include "kernels/simt/numbers.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {

// How the blocks of a split are read, for keys or for values. Blocks
// [codec_begin, codec_end) are read as codes. Blocks [first, sinks_end) and
// [window_begin, end) are read as exact rows. A block may be in both kinds of
// ranges. All six numbers are packed into one register.
class SideBlocks {
 public:
  SideBlocks() = default;
  KVASIR_DEVICE SideBlocks(int32_t first, int32_t end, int32_t sinks_end,
                           int32_t window_begin, int32_t codec_begin,
                           int32_t codec_end)
      : packed_(Packed(first, 0) | Packed(end, 1) | Packed(sinks_end, 2) |
                Packed(window_begin, 3) | Packed(codec_begin, 4) |
                Packed(codec_end, 5)) {}

  KVASIR_DEVICE int32_t first() const { return Block(0); }
  KVASIR_DEVICE int32_t end() const { return Block(1); }
  KVASIR_DEVICE int32_t sinks_end() const { return Block(2); }
  KVASIR_DEVICE int32_t window_begin() const { return Block(3); }
  KVASIR_DEVICE int32_t codec_begin() const { return Block(4); }
  KVASIR_DEVICE int32_t codec_end() const { return Block(5); }

  KVASIR_DEVICE bool any_exact() const {
    return first() < sinks_end() || window_begin() < end();
  }
  KVASIR_DEVICE bool HasExact(int32_t block) const {
    return block < sinks_end() || block >= window_begin();
  }
  // Returns the first block, from `block` on, that is read as exact rows. If
  // there is none, the result is at least end().
  KVASIR_DEVICE int32_t ExactFrom(int32_t block) const {
    return block < sinks_end() || block > window_begin() ? block
                                                         : window_begin();
  }

 private:
  static_assert(kAttentionSplitSlots / kAttentionBlockSlots < 16);
  static KVASIR_DEVICE uint32_t Packed(int32_t block, int32_t place) {
    return static_cast<uint32_t>(block) << (4 * place);
  }
  KVASIR_DEVICE int32_t Block(int32_t place) const {
    return static_cast<int32_t>(packed_ >> (4 * place) & 15u);
  }

  uint32_t packed_ = 0;
};

// Returns the slot of the item's token `token` (an index in the item).
KVASIR_DEVICE int64_t OwnSlot(const Item& item, int32_t token) {
  return item.sequence->first_slot + item.first_token + token;
}

// Returns how the blocks that contain `slots` are read. `slots` must not be
// empty, and must be in the split that begins at slot `split`.
KVASIR_DEVICE SideBlocks BlocksOf(const ExactSlots& exact, const Item& item,
                                  const SlotRange& slots, int64_t split) {
  const auto begin = static_cast<int32_t>(slots.begin - split);
  const auto end = static_cast<int32_t>(slots.end - split);
  constexpr auto kBlock = static_cast<int32_t>(kAttentionBlockSlots);
  const int32_t first = begin / kBlock;
  const int32_t last = (end - 1) / kBlock + 1;
  if (!exact.any()) return {first, last, first, last, first, last};
  // From here on, `sinks` and `window` are counted from the start of the split.
  // The slots [sinks, window) are those that at least one row reads as codes.
  const auto in_split = [&](int64_t slot) {
    const int64_t at = slot - split;
    return at < begin ? begin : at > end ? end : static_cast<int32_t>(at);
  };
  const int32_t sinks = in_split(exact.sinks);
  const int32_t sinks_end = sinks > begin ? (sinks - 1) / kBlock + 1 : first;
  int32_t window = end;
  int32_t window_begin = last;
  if (exact.window > 0) {
    const int64_t behind = OwnSlot(item, 0) - exact.window + 1;
    window = in_split(behind + item.num_tokens - 1);
    const int32_t exact_from = in_split(behind);
    if (exact_from < end) window_begin = exact_from / kBlock;
  }
  if (window_begin < sinks_end) window_begin = sinks_end;
  return {first,          last,
          sinks_end,      window_begin,
          sinks / kBlock, sinks < window ? (window - 1) / kBlock + 1 : 0};
}

// The slots that a row reads as codes, counted from the start of the split. The
// row reads all other slots as exact rows. The row's own token is at slot
// `own`, and the split begins at slot `split`.
struct CodecSlots {
  int32_t begin, end;

  KVASIR_DEVICE bool Has(int32_t s) const { return s >= begin && s < end; }
};
KVASIR_DEVICE CodecSlots CodecSlotsOf(const ExactSlots& exact, int64_t own,
                                      int64_t split) {
  constexpr auto kSplit = static_cast<int32_t>(kAttentionSplitSlots);
  const auto in_split = [&](int64_t slot) {
    const int64_t at = slot - split;
    return at < 0 ? 0 : at > kSplit ? kSplit : static_cast<int32_t>(at);
  };
  return {in_split(exact.sinks),
          exact.window > 0 ? in_split(own - exact.window + 1) : kSplit};
}

// Returns device.key_exact or device.value_exact. The fields are selected one
// by one, because nvcc would keep both structs in local memory if the struct
// were selected by address.
KVASIR_DEVICE ExactSlots ExactOf(const AttentionDevice& device, bool of_keys) {
  const ExactSlots& keys = device.key_exact;
  const ExactSlots& values = device.value_exact;
  ExactSlots slots;
  slots.sinks = of_keys ? keys.sinks : values.sinks;
  slots.window = of_keys ? keys.window : values.window;
  slots.ring_rows = of_keys ? keys.ring_rows : values.ring_rows;
  slots.row_bytes = of_keys ? keys.row_bytes : values.row_bytes;
  slots.segments = of_keys ? keys.segments : values.segments;
  slots.num_segments = of_keys ? keys.num_segments : values.num_segments;
  return slots;
}

// Returns the place of a slot's exact row. For a new token of the launch it is
// -1 - r, where r is the token's row in q (exact_fresh). For other slots it is
// the row's offset in bytes in the arena of the side pages (exact_ring).
KVASIR_DEVICE int64_t RowPlaceOf(const ExactSlots& exact,
                                 const AttentionSequence& sequence,
                                 int64_t slot) {
  const int64_t fresh = slot - sequence.first_slot;
  if (fresh >= 0) return -1 - (sequence.first_row + fresh);
  const auto* const side_pages =
      simt::BitsAs<const int32_t*>(sequence.side_pages);
  return exact.PlaceOfRow(exact.RowOf(slot, sequence.evicted), side_pages)
      .offset_bytes;
}
// Returns the address of the chunk's first channel in an exact row. `place` is
// a result of RowPlaceOf.
KVASIR_DEVICE const char* RowAt(const LatentChunkOnDevice& chunk,
                                int64_t place) {
  return place < 0 ? chunk.exact_fresh + (-1 - place) * chunk.exact_fresh_stride
                   : chunk.exact_ring + place;
}

// `pair` has two 16-bit weights. A negative weight marks a value that is read
// as an exact row. If `as_exact`, returns the absolute values of the negative
// weights, otherwise the other weights. A weight that is left out becomes 0.
KVASIR_DEVICE uint32_t WeightsOf(bool as_exact, uint32_t pair) {
  const uint32_t negative = (pair >> 15 & 0x00010001u) * 0xffffu;
  return as_exact ? pair & negative & 0x7fff7fffu : pair & ~negative;
}

// Adds to `sums` the products of 16 values `a` (of slots `slot`, `slot` + 1 and
// so on of the split) and the weights `b` of rows `row` to `row` + 7, in the
// order of columns in mma_rows-inl.h. These rows may belong to several query
// tokens that see different slots. So each token gets products of its own, in
// which the values of slots that it does not see are zeros. If `mixed`, so are
// values that the token reads in the other form (as codes instead of exact
// rows, or the reverse). Weights of 0 are not enough, because 0 times an
// infinite or NaN value is not 0.
template <typename T, bool mixed>
KVASIR_DEVICE void AddApart(const AttentionDevice& device, const Item& item,
                            bool as_exact, int32_t row, int64_t split,
                            int32_t slot, const uint32_t (&a)[4],
                            const uint32_t (&b)[2], float (&sums)[4]) {
  const auto c = static_cast<int32_t>(simt::Lane() % 4);
  const int32_t heads = item.unit.num_heads;
  const int32_t end_row = row + 8 < item.rows() ? row + 8 : item.rows();
  KVASIR_NO_UNROLL
  for (int32_t t = row / heads; t * heads < end_row; ++t) {
    const SlotRange sees =
        RowSlots(device, *item.sequence, item.first_token + t);
    const auto begin = static_cast<int32_t>(sees.begin - split);
    const auto end = static_cast<int32_t>(sees.end - split);
    const auto reads = [&](int32_t at) {
      return at >= begin && at < end &&
             (!mixed ||
              device.value_exact.Has(OwnSlot(item, t), split + at) == as_exact);
    };
    uint32_t read[4];
    KVASIR_UNROLL
    for (int32_t i = 0; i < 4; ++i) {
      const int32_t at = slot + 2 * c + 8 * (i / 2);
      read[i] = (reads(at) ? a[i] & 0xffffu : 0u) |
                (reads(at + 1) ? a[i] & 0xffff0000u : 0u);
    }
    float added[4];
    KVASIR_UNROLL
    for (int32_t i = 0; i < 4; ++i) added[i] = sums[i];
    Product<T>(added, read, b);
    KVASIR_UNROLL
    for (int32_t i = 0; i < 4; ++i) {
      if ((row + c + i % 2 * 4) / heads == t) sums[i] = added[i];
    }
  }
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
