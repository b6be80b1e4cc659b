// How a launch adds attention mass to slots: which heads belong to a unit of
// eviction, where their kept weights are stored, and how the work is
// divided. All tables are in host memory and are the same for every
// instruction set. C++17.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention/params/paged_attention.h"

namespace kvasir::kernels {

inline constexpr int64_t kBlocksOfSplit =
    kAttentionSplitSlots / kAttentionBlockSlots;
// The most rows (query heads times queries) whose weights over a split are
// collected before they are added to the slots. These weights fill a quarter of
// a level-2 CPU cache of 2 MiB.
inline constexpr int64_t kMassTileRows = 256;

// A unit of eviction: heads of a layer that keep the same slots.
struct MassUnit {
  int64_t unit = 0;  // index in PagedAttentionParams::metadata
  // The unit's heads are in the grid's slices [first_slice, first_slice
  // + num_slices).
  int64_t first_slice = 0;
  int64_t num_slices = 0;
  int64_t first_head = 0;    // index in MassPlan::heads
  int64_t num_heads = 0;     // query heads
  int64_t tile_queries = 0;  // most queries that are scored together
};

// The layout of a thread's tile, which holds the weights of up to kMassTileRows
// rows over a split. Members are offsets in floats.
struct MassTile {
  int64_t weights = 0;  // [rows, 512]
  // [rows, blocks of a split]: a row's weights for a block times this factor
  // are its final softmax weights; kUnseen if the row sees no slot of the block
  int64_t factors = 0;
  int64_t floats = 0;
};
inline constexpr float kUnseen = -1.0f;

// How the launches of a layer add mass. Constant after load.
struct MassPlan {
  std::vector<MassUnit> units;
  // query heads, unit by unit, ascending within a unit
  std::vector<int64_t> heads;
  // [Hq]: index of a query head among the heads of its unit
  std::vector<int64_t> rank;
  MassTile tile;
  // Offsets from AttentionGrid::mass_memory(), in floats.
  int64_t maxima = 0;    // [rows, Hq]: maxima of the softmax
  int64_t inverses = 0;  // [rows, Hq]: 1 / sums of the softmax
  // Start of the kept weights (AttentionSequence::weights_at).
  int64_t weights = 0;
  // [rows] int64: how many units of work of the row's sequence are not computed
  // yet. Used only if the sequence's weights are kept.
  int64_t pending = 0;
  int64_t tiles = 0;   // [threads]: each thread's MassTile
  int64_t floats = 0;  // total number of floats

  bool any() const { return !units.empty(); }
};

// Returns the size in floats of the record that is kept for each block of a
// sequence of one row. The record has the weights [Hq, 64], followed by the
// maxima [Hq] that were subtracted from the scores before Exp.
inline int64_t KeptBlockFloats(int64_t num_heads) {
  return (num_heads * (kAttentionBlockSlots + 1) + 15) / 16 * 16;
}
// Returns the number of blocks that hold slots [begin, end).
inline int64_t BlocksOf(VisibleRange slots) {
  const int64_t first = slots.begin / kAttentionBlockSlots;
  return slots.end <= slots.begin
             ? 0
             : (slots.end - 1) / kAttentionBlockSlots + 1 - first;
}
// Returns the offset from weights_at of the record of the block that contains
// `slot`. `slots` are all slots that the row sees.
inline int64_t KeptBlockOffset(int64_t num_heads, VisibleRange slots,
                               int64_t slot) {
  return (slot / kAttentionBlockSlots - slots.begin / kAttentionBlockSlots) *
         KeptBlockFloats(num_heads);
}
inline bool KeepsWeights(const AttentionSequence& sequence) {
  return sequence.weights_at >= 0 && sequence.num_rows == 1 &&
         sequence.first_counted_row == 0;
}

// An item of work: adds mass to the slots of one split of a sequence. It does
// so for all units of eviction if the sequence's weights are kept, and
// otherwise for one unit.
struct MassItem {
  const AttentionSequence* sequence = nullptr;
  int64_t first_unit = 0;  // index in MassPlan::units
  int64_t num_units = 0;
  int64_t split = 0;
};

// Visits all items of a launch in a fixed order. If `skips_kept`, omits the
// items of sequences whose weights are kept.
class MassCursor {
 public:
  MassCursor(const PagedAttentionArgs& params, const MassPlan& plan,
             bool skips_kept)
      : params_(params), plan_(plan), skips_kept_(skips_kept) {}
  // Moves forward to item `index` and sets `*item`. Returns false if the launch
  // has no such item.
  bool MoveTo(int64_t index, MassItem* item);

 private:
  const PagedAttentionArgs& params_;
  const MassPlan& plan_;
  const bool skips_kept_;
  int64_t sequence_ = 0;
  int64_t first_ = 0;  // index of the sequence's first item
};

// Returns the slots that at least one of the sequence's rows that add
// mass sees.
inline VisibleRange CountedSlots(const PagedAttentionArgs& params,
                                 const AttentionSequence& sequence) {
  if (sequence.first_counted_row >= sequence.num_rows) return {0, 0};
  return {VisibleSlots(params, sequence, sequence.first_counted_row).begin,
          VisibleSlots(params, sequence, sequence.num_rows - 1).end};
}

}  // namespace kvasir::kernels
