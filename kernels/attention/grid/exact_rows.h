// Finds the exact rows of a block's slots in memory. C++17.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/attention/grid/attention_grid.h"
#include "kernels/attention/params/paged_attention.h"

namespace kvasir::kernels {

// Finds the exact rows of one block at a time.
// Threads: each object is used by one thread only.
class BlockExactRows {
 public:
  // Must be called before Find is called for another block or for other slots
  // of the block.
  void Start() { found_ = nullptr; }

  // Finds the exact rows of one group for the slots [begin, end) of a block.
  // Sets rows[i] to the first byte of slot i's row, and readable[i] to the end
  // of the bytes that may be read. Rows in side pages are looked up only once
  // for all groups.
  void Find(const AttentionSequence& sequence,
            const AttentionGrid::ExactPart& exact, int64_t group, int64_t block,
            int64_t begin, int64_t end, const char** rows,
            const char** readable) {
    LookUp(sequence, *exact.slots, block, begin, end);
    const char* const ring = static_cast<const char*>(exact.ring->arena);
    const char* const fresh = static_cast<const char*>(exact.fresh->arena);
    const int64_t in_row = exact.ring->groups[group].codes.offset_bytes;
    const int64_t ahead =
        std::min(kAheadBytes, exact.ring->groups[group].codes.stride_bytes);
    for (int64_t i = begin; i < end; ++i) {
      if (in_ring_[i]) {
        rows[i] = ring + rows_[i] + in_row;
        readable[i] = ring + page_ends_[i];
        for (int64_t b = 0; b < ahead; b += kLineBytes) {
          __builtin_prefetch(rows[i] + b);
        }
        continue;
      }
      // A slot between sinks and window has no exact row. Its entry points to
      // row 0, but the caller never reads it.
      const int64_t row = std::max<int64_t>(0, block + i - sequence.first_slot);
      rows[i] = SlotAddress(*exact.fresh, exact.fresh->groups[group].codes, 0,
                            sequence.first_row + row);
      readable[i] = fresh + exact.fresh->page_bytes;
    }
  }

 private:
  void LookUp(const AttentionSequence& sequence, const ExactSlots& slots,
              int64_t block, int64_t begin, int64_t end) {
    if (found_ == &slots) return;
    found_ = &slots;
    const int32_t* const side_pages = sequence.side_pages.device_address();
    for (int64_t i = begin; i < end; ++i) {
      const int64_t s = block + i;
      in_ring_[i] =
          s < sequence.first_slot && slots.Has(sequence.first_slot, s);
      if (!in_ring_[i]) continue;
      const ExactSlots::Place place =
          slots.PlaceOfRow(slots.RowOf(s, sequence.evicted), side_pages);
      rows_[i] = place.offset_bytes;
      page_ends_[i] = place.end_bytes;
    }
  }

  static constexpr int64_t kLineBytes = 64;
  // How many bytes of a group's data are prefetched in each row. This is done
  // for all rows of a block before they are read, because they may be far apart
  // in memory.
  static constexpr int64_t kAheadBytes = 4 * kLineBytes;

  const ExactSlots* found_ = nullptr;
  bool in_ring_[kAttentionBlockSlots];
  // offset of each slot's row in the arena of the side pages
  int64_t rows_[kAttentionBlockSlots];
  int64_t page_ends_[kAttentionBlockSlots];
};

}  // namespace kvasir::kernels
