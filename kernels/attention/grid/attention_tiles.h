// Computes how often paged_attention reads a sequence's slots. This determines
// how much time it spends on rebuilding keys. C++17, host code.
#pragma once

#include <cstdint>

#include "kernels/attention/grid/attention_grid.h"

namespace kvasir::kernels {

// Returns the number of slots that a launch reads for one KV head of the
// sequence. A slot counts once for each tile of queries that reads it, because
// each tile rebuilds the keys that it reads. grid.fits() must be true. The
// sequence's block table and positions are not read.
int64_t SlotsReadByTiles(const AttentionGrid& grid,
                         const AttentionSequence& sequence);

// Returns the cost of rebuilding the keys or lifting the values of the
// sequence's slots, if a slot costs head_work[j] for KV head j [Hkv]. If the
// query heads of a KV head are in several slices, each slice adds this cost.
double WorkOnTiles(const AttentionGrid& grid, const AttentionSequence& sequence,
                   const double* head_work);

}  // namespace kvasir::kernels
