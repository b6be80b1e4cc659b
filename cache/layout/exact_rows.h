// Where exact rows lie in side pages; the arithmetic below PageLayout.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/layout/layout.h"

namespace kvasir::cache {

// Exact rows and those of outlier chunks are 16-bit numbers.
inline constexpr int64_t kExactNumberBytes = 2;

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A row of the side: its groups one behind the other.
void LayOutExactRow(SideLayout& side);

// Shares the exact rows of a page group out over its layers' arenas, behind
// what `side_pages` says is taken, so that few side pages hold them all. Where
// no page of the group holds the widest row, those of that row's layer are
// filled up. Rows and page_bytes are small enough for PageLayout.
void PlaceExactRows(const std::vector<int64_t>& group,
                    std::vector<LayerLayout>& layers);

}  // namespace kvasir::cache
