// How a launch adds attention mass to slots: which heads belong to a unit of
// eviction, what is kept of their weights, and how the work is cut. Host tables
// only; knows no instruction set. C++17.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention/params/paged_attention.h"

namespace kvasir::kernels {

inline constexpr int64_t kBlocksOfSplit =
    kAttentionSplitSlots / kAttentionBlockSlots;
// Rows (query heads times queries) whose weights over a split are held before
// they are added up: a quarter of a second-level cache with them.
inline constexpr int64_t kMassTileRows = 256;

// A unit of eviction in a launch.
struct MassUnit {
  int64_t unit = 0;         // in the metadata
  int64_t first_slice = 0;  // of the grid's: together its query heads
  int64_t num_slices = 0;
  int64_t first_head = 0;    // in MassPlan::heads
  int64_t num_heads = 0;     // query heads
  int64_t tile_queries = 0;  // that are scored together
};

// Weights of a tile over a split. Offsets in floats.
struct MassTile {
  int64_t weights = 0;  // [rows, 512]
  // [rows, blocks of a split]: what brings a block's weights to shares of all;
  // kUnseen where the row sees nothing of the block.
  int64_t factors = 0;
  int64_t floats = 0;
};
inline constexpr float kUnseen = -1.0f;

// Of a grid; constant after load.
struct MassPlan {
  std::vector<MassUnit> units;
  std::vector<int64_t> heads;  // query heads, unit by unit, each ascending
  std::vector<int64_t> rank;   // [Hq]: place among its unit's
  MassTile tile;
  // Of the launch's memory, in floats.
  int64_t maxima = 0;    // [rows, Hq], of the softmax
  int64_t inverses = 0;  // [rows, Hq]: 1 / its sum
  int64_t weights = 0;   // those that are kept
  // [rows] int64: units of the row's sequence that are still to be computed,
  // if its weights are kept.
  int64_t pending = 0;
  int64_t tiles = 0;   // [threads] of MassTile
  int64_t floats = 0;  // of all

  bool any() const { return !units.empty(); }
};

// What is kept of a block of a sequence of one row: weights [Hq, 64], then the
// maxima that they count from [Hq].
inline int64_t KeptBlockFloats(int64_t num_heads) {
  return (num_heads * (kAttentionBlockSlots + 1) + 15) / 16 * 16;
}
// Blocks of slots [begin, end) and those before them back to a block's start.
inline int64_t BlocksOf(VisibleRange slots) {
  const int64_t first = slots.begin / kAttentionBlockSlots;
  return slots.end <= slots.begin
             ? 0
             : (slots.end - 1) / kAttentionBlockSlots + 1 - first;
}
// Where the record of the block of slot `slot` begins, behind weights_at.
inline int64_t KeptBlockOffset(int64_t num_heads, VisibleRange slots,
                               int64_t slot) {
  return (slot / kAttentionBlockSlots - slots.begin / kAttentionBlockSlots) *
         KeptBlockFloats(num_heads);
}
inline bool KeepsWeights(const AttentionSequence& sequence) {
  return sequence.weights_at >= 0 && sequence.num_rows == 1 &&
         sequence.first_counted_row == 0;
}

// A split of a sequence's slots for one unit, or for all if weights are kept.
struct MassItem {
  const AttentionSequence* sequence = nullptr;
  int64_t first_unit = 0;  // in MassPlan::units
  int64_t num_units = 0;
  int64_t split = 0;
};

// Walks over all items of a launch, in one fixed order; maybe without those of
// sequences whose weights are kept.
class MassCursor {
 public:
  MassCursor(const PagedAttentionArgs& params, const MassPlan& plan,
             bool skips_kept)
      : params_(params), plan_(plan), skips_kept_(skips_kept) {}
  // Moves forward to item `index`; false when there are fewer.
  bool MoveTo(int64_t index, MassItem* item);

 private:
  const PagedAttentionArgs& params_;
  const MassPlan& plan_;
  const bool skips_kept_;
  int64_t sequence_ = 0;
  int64_t first_ = 0;  // index of the sequence's first item
};

// Slots that any counted row of a sequence sees.
inline VisibleRange CountedSlots(const PagedAttentionArgs& params,
                                 const AttentionSequence& sequence) {
  if (sequence.first_counted_row >= sequence.num_rows) return {0, 0};
  return {VisibleSlots(params, sequence, sequence.first_counted_row).begin,
          VisibleSlots(params, sequence, sequence.num_rows - 1).end};
}

}  // namespace kvasir::kernels
