// The items of work that CTAs of paged_attention compute on a GPU, and how the
// results of splits are merged. C++17, device code.
#pragma once

#include "kernels/attention/cuda/device_attention.h"
#include "kernels/simt/memory.h"
#include "kernels/simt/numbers.h"
#include "kernels/simt/warp.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {

struct AttentionKernelArgs {
  AttentionDevice device;
  const void* q = nullptr;  // the type of q and out is device.dtype
  void* out = nullptr;
  const AttentionSequence* sequences = nullptr;
  int32_t num_sequences = 0;
  SequenceItems* items = nullptr;  // [num_sequences + 1]
  // The partial results: [most_partials, Hq, partial_floats()].
  float* partials = nullptr;
  // [most_mass_rows, Hq, 2]: the maximum score and 1 / the sum of weights of
  // each row's whole softmax. Set only for rows that add mass.
  float* mass_totals = nullptr;
  // How many rows an item of the kernel for prompts has. 0: that kernel does
  // not run.
  int32_t prompt_rows = 0;
  // The numbers of persistent CTAs of the decoding kernel and of the kernel for
  // prompts.
  int32_t ctas = 0;
  int32_t prompt_ctas = 0;
};

// Quotient and Remainder divide numbers below 2^32, such as slot numbers
// (kAttentionMostSlots), in 32 bits. On a GPU, a 64-bit division is a function
// call, for which registers must be spilled to memory.
KVASIR_DEVICE uint32_t Quotient(int64_t number, int64_t by) {
  return static_cast<uint32_t>(number) / static_cast<uint32_t>(by);
}
KVASIR_DEVICE uint32_t Remainder(int64_t number, int64_t by) {
  return static_cast<uint32_t>(number) % static_cast<uint32_t>(by);
}

struct SlotRange {
  int64_t begin;
  int64_t end;
};

// Returns the slots that a row sees, like VisibleSlots in paged_attention.h.
KVASIR_DEVICE SlotRange RowSlots(const AttentionDevice& device,
                                 const AttentionSequence& sequence,
                                 int64_t row) {
  const int64_t own = sequence.first_slot + row;
  SlotRange range;
  range.begin = sequence.first_live_index * device.page_tokens;
  range.end = device.causal ? own + 1 : sequence.first_slot + sequence.num_rows;
  if (device.window > 0 && own + 1 - device.window > range.begin) {
    range.begin = own + 1 - device.window;
  }
  return range;
}
// Returns the slots that at least one of the rows [first, first + count) sees.
KVASIR_DEVICE SlotRange RowsSlots(const AttentionDevice& device,
                                  const AttentionSequence& sequence,
                                  int64_t first, int64_t count) {
  return {RowSlots(device, sequence, first).begin,
          RowSlots(device, sequence, first + count - 1).end};
}
KVASIR_DEVICE SlotRange Both(const SlotRange& a, const SlotRange& b) {
  return {a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
}
KVASIR_DEVICE SlotRange SplitSlots(int64_t split) {
  return {split * kAttentionSplitSlots, (split + 1) * kAttentionSplitSlots};
}

// The work that a CTA computes at a time: attention of a unit's query heads for
// some tokens of a sequence, over all slots or over some splits of them.
struct Item {
  const AttentionSequence* sequence;
  HeadUnit unit;
  int32_t unit_index;
  int64_t first_token;  // index among the sequence's rows
  int32_t num_tokens;
  int64_t first_split;
  int32_t num_splits;
  // If negative, the item covers all splits and writes rows of `out`.
  // Otherwise, this is the index, in AttentionKernelArgs::partials, of the
  // partial result of the item's first token and first split. The next split
  // has the next index; the next token's index is higher by partial_stride.
  int32_t partial;
  int32_t partial_stride;

  // An item has a row for each token and head. The rows of a token are
  // consecutive.
  KVASIR_DEVICE int32_t rows() const { return num_tokens * unit.num_heads; }
  KVASIR_DEVICE int32_t TokenIn(int32_t row) const {
    return num_tokens == 1 ? 0 : row / unit.num_heads;
  }
  KVASIR_DEVICE int64_t TokenOf(int32_t row) const {
    return first_token + TokenIn(row);
  }
  // Returns the index of the row's head in AttentionDevice::heads.
  KVASIR_DEVICE int32_t PlaceOf(int32_t row) const {
    return unit.first_head + row - TokenIn(row) * unit.num_heads;
  }
};

// Returns whether the block of 64 slots from slot `block` on may contain slots
// that some rows of the item see and others do not.
KVASIR_DEVICE bool SeenBySome(const AttentionDevice& device, const Item& item,
                              int64_t block) {
  if (item.num_tokens == 1) return false;
  const SlotRange first = RowSlots(device, *item.sequence, item.first_token);
  const SlotRange last =
      RowSlots(device, *item.sequence, item.first_token + item.num_tokens - 1);
  return block < last.begin || block + kAttentionBlockSlots > first.end;
}

// Returns the sequence that contains `index`: the last one whose `first` is at
// most `index`. `first` is a member of SequenceItems, for example first_item.
template <int32_t SequenceItems::*first>
KVASIR_DEVICE int32_t FindSequence(const AttentionKernelArgs& args,
                                   int32_t index) {
  int32_t low = 0;
  int32_t high = args.num_sequences;  // the entry at `high` has *first > index
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    (args.items[middle].*first <= index ? low : high) = middle;
  }
  return low;
}

KVASIR_DEVICE Item FindItem(const AttentionKernelArgs& args, int32_t index) {
  const int32_t s = FindSequence<&SequenceItems::first_item>(args, index);
  const SequenceItems items = args.items[s];
  const auto units = static_cast<int32_t>(args.device.num_units);
  int32_t rest = index - items.first_item;
  Item item;
  item.sequence = args.sequences + s;
  item.first_split = items.first_split;
  item.num_splits = items.num_splits;
  item.partial = -1;
  item.partial_stride = items.num_splits;
  int32_t split = 0;
  if (items.first_partial >= 0) {
    const int32_t each = items.item_splits;
    const int32_t runs = (items.num_splits + each - 1) / each;
    split = rest % runs * each;
    rest /= runs;
    item.first_split += split;
    const int32_t splits_left = items.num_splits - split;
    item.num_splits = splits_left < each ? splits_left : each;
  }
  item.unit_index = rest % units;
  item.unit = args.device.units[item.unit_index];
  item.first_token = rest / units * args.device.tile_tokens;
  const int64_t left = item.sequence->num_rows - item.first_token;
  item.num_tokens = static_cast<int32_t>(
      left < args.device.tile_tokens ? left : args.device.tile_tokens);
  if (items.first_partial >= 0) {
    item.partial = items.first_partial +
                   static_cast<int32_t>(item.first_token) * items.num_splits +
                   split;
  }
  return item;
}

// Returns the address of one head's share of the partial result with index
// `partial`. `head` is an index in AttentionDevice::heads.
KVASIR_DEVICE float* PartialOf(const AttentionKernelArgs& args, int64_t partial,
                               int64_t head) {
  return args.partials + (partial * args.device.num_heads + head) *
                             args.device.partial_floats();
}

KVASIR_DEVICE float* PartialRow(const AttentionKernelArgs& args,
                                const Item& item, int32_t row) {
  const int32_t token = item.TokenIn(row);
  return PartialOf(args, item.partial + token * item.partial_stride,
                   item.PlaceOf(row));
}
// Returns the index in q or out at which a row of the item begins. `column` is
// DevicePart::column or LatentChunkOnDevice::head_column.
KVASIR_DEVICE int64_t RowStart(const AttentionKernelArgs& args,
                               const Item& item, int32_t row,
                               const int64_t* column, int64_t row_stride) {
  return (item.sequence->first_row + item.TokenOf(row)) * row_stride +
         column[args.device.heads[item.PlaceOf(row)]];
}

// Special maxima and scores. kNoSlot: the maximum of a row that sees no slot.
// kLeastMax: the lowest possible maximum of a row that sees slots. kHidden: the
// score of a slot that the row does not see.
inline constexpr float kNoSlot = -3.0e38f;
inline constexpr float kLeastMax = -2.9e38f;
inline constexpr float kHidden = -3.3e38f;
KVASIR_DEVICE bool SeesSlots(float max) { return max > kNoSlot; }

// The maximum score and the sum of weights of a row's softmax, over the splits
// merged so far. Weights are powers of 2, not of e.
struct RowTotal {
  float max = kNoSlot;
  float sum = 0.0f;
};
// The factors of a merge: `total` multiplies the sums of the splits merged so
// far, and `split` those of the split that is added.
struct MergeFactors {
  float total;
  float split;
};
KVASIR_DEVICE MergeFactors Merge(float max, float sum, RowTotal* total) {
  const float most = max > total->max ? max : total->max;
  const MergeFactors factors = {simt::Exp2(total->max - most),
                                simt::Exp2(max - most)};
  total->sum = simt::Fma(sum, factors.split, total->sum * factors.total);
  total->max = most;
  return factors;
}
KVASIR_DEVICE float MergeSum(const MergeFactors& factors, float total,
                             float split) {
  return simt::Fma(split, factors.split, total * factors.total);
}

// Ends a split's softmax for one row. Only one lane may call it. If the item
// writes partial results, stores the split's maximum and sum of weights in
// them. Otherwise stores four numbers in `factors`, in shared memory, `stride`
// apart: the two MergeFactors, the merged sum of weights and the merged
// maximum. They include the results of earlier splits if `merged` is true:
// `factors` must then still have the four numbers of the previous split.
KVASIR_DEVICE void EndSoftmax(const AttentionKernelArgs& args, const Item& item,
                              int32_t row, const RowTotal& split, bool merged,
                              float* factors, int32_t stride) {
  if (item.partial >= 0) {
    if (row >= item.rows()) return;
    float* const partial = PartialRow(args, item, row) + args.device.out_width;
    simt::StoreGlobal(partial, split.max);
    simt::StoreGlobal(partial + 1, split.sum);
    return;
  }
  RowTotal total;
  if (merged) {
    total = {simt::LoadShared(factors + 3 * stride),
             simt::LoadShared(factors + 2 * stride)};
  }
  const MergeFactors merge = Merge(split.max, split.sum, &total);
  simt::StoreShared(factors, merge.total);
  simt::StoreShared(factors + stride, merge.split);
  simt::StoreShared(factors + 2 * stride, total.sum);
  simt::StoreShared(factors + 3 * stride, total.max);
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
