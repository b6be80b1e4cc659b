#include "kernels/attention/grid/attention_mass.h"

#include <algorithm>

#include "kernels/attention/grid/attention_grid.h"

namespace kvasir::kernels {

bool MassCursor::MoveTo(int64_t index, MassItem* item) {
  const auto num_units = static_cast<int64_t>(plan_.units.size());
  for (; sequence_ < params_.num_sequences; ++sequence_) {
    const AttentionSequence& sequence = params_.sequences[sequence_];
    const VisibleRange slots = CountedSlots(params_, sequence);
    if (slots.begin >= slots.end) continue;
    if (skips_kept_ && KeepsWeights(sequence)) continue;
    const int64_t first_split = slots.begin / kAttentionSplitSlots;
    const int64_t splits =
        (slots.end - 1) / kAttentionSplitSlots + 1 - first_split;
    const int64_t together = KeepsWeights(sequence) ? num_units : 1;
    const int64_t of_split = num_units / together;
    const int64_t here = index - first_;
    if (here < splits * of_split) {
      *item = {&sequence, here % of_split, together,
               first_split + here / of_split};
      return true;
    }
    first_ += splits * of_split;
  }
  return false;
}

void AttentionGrid::PlanMass(
    const std::vector<std::vector<int64_t>>& clusters) {
  if (params_.mass.most_rows == 0) return;
  mass_.rank.resize(static_cast<size_t>(params_.num_heads));
  int64_t tile_rows = 0;
  for (int64_t u = 0; u < params_.metadata.num_units; ++u) {
    MassUnit unit;
    unit.unit = u;
    unit.first_head = static_cast<int64_t>(mass_.heads.size());
    unit.first_slice = static_cast<int64_t>(slices_.size());
    for (int64_t j = 0; j < params_.num_kv_heads; ++j) {
      if (params_.unit_of_head[j] != u) continue;
      for (int64_t h = j * heads_per_kv_; h < (j + 1) * heads_per_kv_; ++h) {
        mass_.rank[static_cast<size_t>(h)] = unit.num_heads++;
        mass_.heads.push_back(h);
      }
    }
    if (unit.num_heads == 0) continue;
    for (const std::vector<int64_t>& cluster : clusters) {
      std::vector<int64_t> of_unit;
      for (const int64_t j : cluster) {
        if (params_.unit_of_head[j] == u) of_unit.push_back(j);
      }
      if (of_unit.empty()) continue;
      if (!makes_tiles()) {
        AddSlices(of_unit);
        continue;
      }
      // If keys are rebuilt or values lifted, a slice has a single KV head,
      // because a rebuilt tile is used for many panels of one head.
      for (const int64_t j : of_unit) AddSlices({j});
    }
    unit.num_slices = static_cast<int64_t>(slices_.size()) - unit.first_slice;
    unit.tile_queries = std::max<int64_t>(1, kMassTileRows / unit.num_heads);
    for (int64_t s = unit.first_slice; s < unit.first_slice + unit.num_slices;
         ++s) {
      unit.tile_queries =
          std::min(unit.tile_queries,
                   max_panels_ *
                       (max_rows_ / slices_[static_cast<size_t>(s)].num_heads));
    }
    tile_rows = std::max(tile_rows, unit.tile_queries * unit.num_heads);
    mass_.units.push_back(unit);
  }
  mass_.tile.factors = tile_rows * kAttentionSplitSlots;
  // The tile must also have room for one factor per query head, which
  // MassWorker::AddKept stores there.
  const int64_t floats = std::max(
      mass_.tile.factors + tile_rows * kBlocksOfSplit, params_.num_heads);
  mass_.tile.floats = (floats + 15) / 16 * 16;
  const int64_t totals =
      (params_.mass.most_rows * params_.num_heads + 15) / 16 * 16;
  mass_.inverses = totals;
  mass_.weights = 2 * totals;
  mass_.pending = mass_.weights + (params_.mass.most_weights + 15) / 16 * 16;
  mass_.tiles = mass_.pending + (2 * params_.mass.most_rows + 15) / 16 * 16;
  mass_.floats = mass_.tiles + threads_ * mass_.tile.floats;
}

}  // namespace kvasir::kernels
