// Exact rows: plain numbers of sinks and windows that attention reads in place
// of codes. C++17.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "kernels/latents/latent_view.h"

namespace kvasir::kernels {

// Exact rows that are stored consecutively. Row r is row (r - first_row) %
// rows_per_page of the sequence's side page first_page + (r - first_row) /
// rows_per_page. Offsets are counted from the start of the arena of the rows'
// parts; the pages may lie in another arena after it.
struct ExactSegment {
  int64_t first_row = 0;  // the next segment's rows follow
  int64_t first_page = 0;
  int64_t rows_per_page = 0;
  int64_t arena_bytes = 0;  // start of page 0
  int64_t page_bytes = 0;
  int64_t offset_bytes = 0;  // of the first row within a page

  friend bool operator==(const ExactSegment& a, const ExactSegment& b) {
    return a.first_row == b.first_row && a.first_page == b.first_page &&
           a.rows_per_page == b.rows_per_page &&
           a.arena_bytes == b.arena_bytes && a.page_bytes == b.page_bytes &&
           a.offset_bytes == b.offset_bytes;
  }
};

// Slots that are read as exact rows, for the keys or for the values. A query at
// slot p reads the visible slots s < sinks and s > p - window as plain numbers
// that are stored in addition to the codes. It reads all others through the
// codec.
struct ExactSlots {
  int64_t sinks = 0;   // 0: no sinks
  int64_t window = 0;  // 0: no window
  // The rows of slots before first_slot lie in the sequence's side pages: first
  // those of the sinks, then those of a ring.
  int64_t ring_rows = 0;  // at least window - 1; not 0 if there is a window
  int64_t row_bytes = 0;  // distance of the rows in a page
  // Sorted by first_row, which begins at 0. In the memory space of the latents'
  // views.
  const ExactSegment* segments = nullptr;
  int64_t num_segments = 0;

  KVASIR_HOST_DEVICE bool any() const { return sinks > 0 || window > 0; }
  KVASIR_HOST_DEVICE bool Has(int64_t own, int64_t slot) const {
    return slot < sinks || (window > 0 && slot > own - window);
  }
  // `evicted` is AttentionSequence::evicted. Evicted slots lie between the
  // sinks and the window.
  KVASIR_HOST_DEVICE int64_t RowOf(int64_t slot, int64_t evicted) const {
    if (slot < sinks) return slot;
    // 32 bits, because a GPU calls a function for a 64-bit division.
    return sinks + static_cast<uint32_t>(slot + evicted - sinks) %
                       static_cast<uint32_t>(ring_rows);
  }
  struct Place {
    int64_t offset_bytes;  // of the row
    int64_t end_bytes;     // of its page
  };
  KVASIR_HOST_DEVICE Place PlaceOfRow(int64_t row,
                                      const int32_t* side_pages) const {
    int64_t s = 0;
    while (s + 1 < num_segments && segments[s + 1].first_row <= row) ++s;
    const ExactSegment& segment = segments[s];
    const int64_t in_segment = row - segment.first_row;
    const int64_t index = static_cast<uint32_t>(in_segment) /
                          static_cast<uint32_t>(segment.rows_per_page);
    const int64_t page =
        segment.arena_bytes +
        side_pages[segment.first_page + index] * segment.page_bytes;
    return {page + segment.offset_bytes +
                (in_segment - index * segment.rows_per_page) * row_bytes,
            page + segment.page_bytes};
  }
};

// Exact rows of a part. They are numbers, in groups as wide as the part's own.
// A launch reads the rows of its own tokens from `fresh`: in the ring they
// would overwrite rows that its first tokens still see.
template <template <typename> class Ptr>
struct ExactRowsIn {
  LatentPartIn<Ptr> ring;   // pages of one slot, which is a row at any offset
  LatentPartIn<Ptr> fresh;  // one page, whose slot r is row r of q
};
using ExactRows = ExactRowsIn<DevicePtr>;
using ExactRowsArgs = ExactRowsIn<LaunchPtr>;

}  // namespace kvasir::kernels
