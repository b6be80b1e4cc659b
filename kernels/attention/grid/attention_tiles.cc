#include "kernels/attention/grid/attention_tiles.h"

#include <algorithm>

namespace kvasir::kernels {

int64_t SlotsReadByTiles(const AttentionGrid& grid,
                         const AttentionSequence& sequence) {
  const int64_t num_tiles = grid.CutOf(sequence).num_tiles;
  int64_t slots = 0;
  AttentionUnit unit = {&sequence, nullptr, 0, 0};
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int64_t end = sequence.num_rows * (tile + 1) / num_tiles;
    unit.query_begin = sequence.num_rows * tile / num_tiles;
    unit.num_queries = end - unit.query_begin;
    const VisibleRange range = UnitSlots(grid.params(), unit);
    slots += std::max<int64_t>(0, range.end - range.begin);
  }
  return slots;
}

double WorkOnTiles(const AttentionGrid& grid, const AttentionSequence& sequence,
                   const double* head_work) {
  const AttentionGrid::Cut cut = grid.CutOf(sequence);
  double of_slot = 0;
  for (int64_t s = 0; s < cut.num_slices; ++s) {
    const int64_t* heads = grid.heads() + cut.slices[s].first_head;
    // The KV head whose work was added last. The query heads of a KV head are
    // adjacent, so each KV head is counted once.
    int64_t last = -1;
    for (int64_t i = 0; i < cut.slices[s].num_heads; ++i) {
      const int64_t kv_head = heads[i] / grid.heads_per_kv();
      if (kv_head != last) of_slot += head_work[kv_head];
      last = kv_head;
    }
  }
  return of_slot * static_cast<double>(SlotsReadByTiles(grid, sequence));
}

}  // namespace kvasir::kernels
