// Places exact rows in side pages, for PageLayout.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/layout/layout.h"

namespace kvasir::cache {

// Exact rows and the rows of outlier chunks consist of 16-bit numbers.
inline constexpr int64_t kExactNumberBytes = 2;

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Lays out one row of the side: its groups one after the other.
void LayOutExactRow(SideLayout& side);

// Distributes the exact rows of a page group over its layers' arenas, after the
// pages that `side_pages` counts as taken, so that few side pages hold them
// all. If no page of the group holds the widest row, the page of that row's
// layer grows. Rows and page_bytes are small enough for PageLayout.
void PlaceExactRows(const std::vector<int64_t>& group,
                    std::vector<LayerLayout>& layers);

}  // namespace kvasir::cache
