#include "kernels/attention_tiles.h"

#include <algorithm>

namespace kvasir::kernels {

int64_t SlotsReadByTiles(const AttentionPlan& plan,
                         const AttentionSequence& sequence) {
  const int64_t num_tiles = plan.CutOf(sequence).num_tiles;
  int64_t slots = 0;
  AttentionUnit unit = {&sequence, nullptr, 0, 0};
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int64_t end = sequence.num_rows * (tile + 1) / num_tiles;
    unit.query_begin = sequence.num_rows * tile / num_tiles;
    unit.num_queries = end - unit.query_begin;
    const VisibleRange range = UnitSlots(plan.params(), unit);
    slots += std::max<int64_t>(0, range.end - range.begin);
  }
  return slots;
}

}  // namespace kvasir::kernels
