// How often paged_attention reads a sequence's slots: what its keys' rebuilding
// costs. Host arithmetic. C++17.
#pragma once

#include <cstdint>

#include "kernels/attention/grid/attention_grid.h"

namespace kvasir::kernels {

// Slots that a launch reads for one KV head of the sequence, those of every
// tile of its queries together: a tile rebuilds for itself. `grid` fits; the
// sequence's tables are not looked at.
int64_t SlotsReadByTiles(const AttentionGrid& grid,
                         const AttentionSequence& sequence);

// What a launch does to make keys or values of the sequence's slots, where a
// slot costs head_work[j] for KV head j [Hkv]. A KV head whose query heads are
// in several slices is made for each of them.
double WorkOnTiles(const AttentionGrid& grid, const AttentionSequence& sequence,
                   const double* head_work);

}  // namespace kvasir::kernels
