// Helper of PageLayout: places exact rows (uncompressed latents of some tokens)
// in side pages.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/layout/layout.h"

namespace kvasir::cache {

// Exact rows consist of 16-bit numbers.
inline constexpr int64_t kExactNumberBytes = 2;

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Sets GroupLayout::exact_offset_bytes of each group of the side. In an exact
// row, the groups follow one another without gaps.
void LayOutExactRow(SideLayout& side);

// Distributes the exact rows of a page group over its layers' arenas, so that
// few side pages hold them. At the call, the first LayerLayout::side_pages side
// pages of a sequence in each arena hold other data. If no page of the group is
// large enough for the widest row, the pages of that row's layer are enlarged.
// Row and page sizes must be within PageLayout's limits.
void PlaceExactRows(const std::vector<int64_t>& group,
                    std::vector<LayerLayout>& layers);

}  // namespace kvasir::cache
