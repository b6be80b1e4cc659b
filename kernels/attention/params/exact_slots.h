// Exact rows: unquantized keys or values of a sequence's first slots (sinks)
// and of its most recent slots (window). Attention reads them in place of
// codes. C++17.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "kernels/latents/latent_view.h"

namespace kvasir::kernels {

// Exact rows that are stored consecutively. With i = r - first_row, exact row r
// is row i % rows_per_page of the sequence's side page first_page + i /
// rows_per_page. Offsets are counted from the start of the arena of the rows'
// parts, even if the side pages lie in a different arena at a higher address.
struct ExactSegment {
  int64_t first_row = 0;  // the segment ends before the next one's first_row
  int64_t first_page = 0;
  int64_t rows_per_page = 0;
  int64_t arena_bytes = 0;  // offset of the start of page 0
  int64_t page_bytes = 0;
  int64_t offset_bytes = 0;  // offset of the first row within a page

  friend bool operator==(const ExactSegment& a, const ExactSegment& b) {
    return a.first_row == b.first_row && a.first_page == b.first_page &&
           a.rows_per_page == b.rows_per_page &&
           a.arena_bytes == b.arena_bytes && a.page_bytes == b.page_bytes &&
           a.offset_bytes == b.offset_bytes;
  }
};

// Defines which slots are read as exact rows, for the keys or for the values.
// For a query at slot p, a visible slot s is read as an exact row if s < sinks
// or s > p - window. All other visible slots are read by decoding their codes.
struct ExactSlots {
  int64_t sinks = 0;   // 0: no sinks
  int64_t window = 0;  // 0: no window
  // The sequence's side pages hold the exact rows of slots before
  // AttentionSequence::first_slot: first the rows of the sinks, then a ring
  // buffer of the window's rows.
  int64_t ring_rows = 0;  // at least max(window - 1, 1) if there is a window
  int64_t row_bytes = 0;  // distance between the starts of two rows in a page
  // Where the exact rows are stored, sorted by first_row; the first segment has
  // first_row 0. The array is in the same memory (host or device) as the tables
  // of the latents.
  const ExactSegment* segments = nullptr;
  int64_t num_segments = 0;

  KVASIR_HOST_DEVICE bool any() const { return sinks > 0 || window > 0; }
  KVASIR_HOST_DEVICE bool Has(int64_t own, int64_t slot) const {
    return slot < sinks || (window > 0 && slot > own - window);
  }
  // Returns which row of the side pages is the exact row of slot `slot`.
  // `evicted` is AttentionSequence::evicted. Only slots between the sinks and
  // the window are evicted.
  KVASIR_HOST_DEVICE int64_t RowOf(int64_t slot, int64_t evicted) const {
    if (slot < sinks) return slot;
    // Divides in 32 bits, because a GPU needs a slow function to divide 64-bit
    // numbers.
    return sinks + static_cast<uint32_t>(slot + evicted - sinks) %
                       static_cast<uint32_t>(ring_rows);
  }
  struct Place {
    int64_t offset_bytes;  // start of the row
    int64_t end_bytes;     // end of the page that holds it
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

// Views of the exact rows of a part: unquantized numbers, in groups as wide as
// the groups of the part itself. A launch reads the rows of its new tokens from
// `fresh`. They are not in the ring yet, because the ring still has older rows
// that the first new tokens see.
template <template <typename> class Ptr>
struct ExactRowsIn {
  // The rows in side pages. This view treats each page as having one slot,
  // because a row may begin at any offset of a page.
  LatentPartIn<Ptr> ring;
  // A single page. Its slot r belongs to row r of q.
  LatentPartIn<Ptr> fresh;
};
using ExactRows = ExactRowsIn<DevicePtr>;
using ExactRowsArgs = ExactRowsIn<LaunchPtr>;

}  // namespace kvasir::kernels
