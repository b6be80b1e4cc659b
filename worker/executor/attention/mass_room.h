// How much memory the launches of a step get for attention mass: the attention
// weights that score slots for eviction.
#pragma once

#include <cstdint>

#include "cache/layout/layout.h"
#include "kernels/attention/params/paged_attention.h"
#include "plan/resolved_plan.h"

namespace kvasir::worker {

// Memory for the attention mass of slots, in layers that evict by scores.
struct MassRoom {
  int64_t most_rows = 0;     // of one step
  int64_t most_weights = 0;  // of one step; see kernels::AttentionMass
};

struct MassRoomLimits {
  int64_t max_batched_tokens = 0;
  int64_t max_num_seqs = 0;
  int64_t most_slots = 0;  // of one sequence
  // Slots of the page group that has the most, and bytes of all groups.
  int64_t pool_slots = 0;
  int64_t pool_bytes = 0;
  int64_t num_heads = 0;  // query heads of this rank
};

// A sequence that decodes keeps the attention weights of its row while there is
// room. For the others the launch scores the keys again, which takes nearly as
// long as all of its attention. So there is room for all slots of the pool, in
// blocks of sequences, limited to 32 MiB or a 32nd of the pool, whichever is
// more.
MassRoom RoomForMass(const MassRoomLimits& limits);

// Completes `steps` (its first three fields; most_slots for a pool of any size)
// for a pool of `pages`. `layout` was made for `plan`.
MassRoomLimits LimitsInPool(MassRoomLimits steps,
                            const plan::ResolvedPlan& plan,
                            const cache::PageLayout& layout,
                            const cache::PageCounts& pages);

// Bytes of the weights that RoomForMass makes room for; 0 if no layer of the
// plan evicts by scores.
int64_t KeptWeightBytes(const plan::ResolvedPlan& plan,
                        const MassRoomLimits& limits);

// How a launch gets the attention that a sequence's rows give to slots.
enum class ScoringKind : uint8_t {
  kKept,    // from the weights of its one row
  kAgain,   // from its keys: it has several rows, or no row that counts
  kNoRoom,  // from its keys: there is no room for its weights
};
ScoringKind ScoringOf(const kernels::AttentionSequence& sequence);

}  // namespace kvasir::worker
