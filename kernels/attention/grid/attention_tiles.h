// How often paged_attention reads a sequence's slots, which determines the cost
// of rebuilding keys. Host arithmetic. C++17.
#pragma once

#include <cstdint>

#include "kernels/attention/grid/attention_grid.h"

namespace kvasir::kernels {

// The number of slots that a launch reads for one KV head of the sequence,
// summed over the tiles of its queries, because each tile rebuilds its own
// keys. `grid` must fit (AttentionGrid::fits). The sequence's tables are not
// read.
int64_t SlotsReadByTiles(const AttentionGrid& grid,
                         const AttentionSequence& sequence);

// The work of making keys or values of the sequence's slots, if a slot costs
// head_work[j] for KV head j [Hkv]. A KV head whose query heads are in several
// slices is made for each of them.
double WorkOnTiles(const AttentionGrid& grid, const AttentionSequence& sequence,
                   const double* head_work);

}  // namespace kvasir::kernels
