#include "worker/executor/attention/mass_room.h"

#include <algorithm>

#include "kernels/attention/grid/attention_mass.h"

namespace kvasir::worker {
namespace {

constexpr int64_t kBytesOfAnyPool = int64_t{32} << 20;
constexpr int64_t kPartOfPool = 32;

}  // namespace

MassRoom RoomForMass(const MassRoomLimits& limits) {
  constexpr int64_t kBlock = kernels::kAttentionBlockSlots;
  const int64_t most_bytes =
      std::max(kBytesOfAnyPool, limits.pool_bytes / kPartOfPool);
  // The last block of each sequence may be partly filled, so each sequence may
  // need one block more than its slots fill.
  const int64_t blocks =
      std::min(limits.max_num_seqs * (limits.most_slots / kBlock + 1),
               limits.pool_slots / kBlock + limits.max_num_seqs);
  return {.most_rows = limits.max_batched_tokens,
          .most_weights =
              std::min(most_bytes / static_cast<int64_t>(sizeof(float)),
                       blocks * kernels::KeptBlockFloats(limits.num_heads))};
}

MassRoomLimits LimitsInPool(MassRoomLimits steps,
                            const plan::ResolvedPlan& plan,
                            const cache::PageLayout& layout,
                            const cache::PageCounts& pages) {
  steps.pool_slots = 0;
  steps.pool_bytes = 0;
  for (const cache::PageGroupLayout& group : layout.page_groups()) {
    const int64_t count = pages[static_cast<size_t>(group.id.value())];
    steps.pool_bytes += count * group.page_bytes;
    if (!group.eviction.evicts()) continue;
    steps.pool_slots = std::max(steps.pool_slots, count * layout.page_tokens());
  }
  steps.most_slots = std::min(steps.most_slots, steps.pool_slots);
  steps.num_heads = plan.query_heads.count;
  return steps;
}

int64_t KeptWeightBytes(const plan::ResolvedPlan& plan,
                        const MassRoomLimits& limits) {
  const bool scores =
      std::any_of(plan.layers.begin(), plan.layers.end(),
                  [](const plan::ResolvedLayer& layer) {
                    return layer.eviction.has_value() && layer.eviction->scored;
                  });
  return scores ? RoomForMass(limits).most_weights *
                      static_cast<int64_t>(sizeof(float))
                : 0;
}

ScoringKind ScoringOf(const kernels::AttentionSequence& sequence) {
  if (kernels::KeepsWeights(sequence)) return ScoringKind::kKept;
  return sequence.num_rows == 1 && sequence.first_counted_row == 0
             ? ScoringKind::kNoRoom
             : ScoringKind::kAgain;
}

}  // namespace kvasir::worker
