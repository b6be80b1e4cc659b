// Decides how much memory the launches of a step get for attention mass: the
// sums of attention weights that are the slots' scores for eviction.
#pragma once

#include <cstdint>

#include "cache/layout/layout.h"
#include "kernels/attention/params/paged_attention.h"
#include "plan/resolved_plan.h"

namespace kvasir::worker {

// Memory for the attention mass (sums of attention weights) of slots, in layers
// that evict by scores.
struct MassRoom {
  int64_t most_rows = 0;     // the most rows in one step
  int64_t most_weights = 0;  // floats of one step, see kernels::AttentionMass
};

struct MassRoomLimits {
  int64_t max_batched_tokens = 0;
  int64_t max_num_seqs = 0;
  int64_t most_slots = 0;  // the most slots of one sequence
  // Slots of the largest page group that evicts, and bytes of all page groups.
  int64_t pool_slots = 0;
  int64_t pool_bytes = 0;
  int64_t num_heads = 0;  // query heads of this rank
};

// Chooses the size of the memory for attention mass. It keeps the attention
// weights of each sequence that decodes, if they fit. For a sequence whose
// weights do not fit, the launch computes the scores from the keys again, which
// takes nearly as long as its attention. So the memory has room for the weights
// of all slots of the pool, in blocks of slots per sequence, but is limited to
// 32 MiB or 1/32 of the pool, whichever is more.
MassRoom RoomForMass(const MassRoomLimits& limits);

// Returns `steps` with all fields set, for a pool of `pages`. The caller has
// set the first three fields; most_slots is lowered if the pool holds fewer
// slots. `layout` was made for `plan`.
MassRoomLimits LimitsInPool(MassRoomLimits steps,
                            const plan::ResolvedPlan& plan,
                            const cache::PageLayout& layout,
                            const cache::PageCounts& pages);

// Bytes of MassRoom::most_weights; 0 if no layer of the plan evicts by scores.
int64_t KeptWeightBytes(const plan::ResolvedPlan& plan,
                        const MassRoomLimits& limits);

// How a launch finds the attention weights that a sequence's rows give to
// slots.
enum class ScoringKind : uint8_t {
  kKept,  // the weights of its only row were kept
  // computed from keys again: the sequence has several rows, or its only row
  // does not add to scores
  kAgain,
  kNoRoom,  // computed from keys again: the sequence's weights did not fit
};
ScoringKind ScoringOf(const kernels::AttentionSequence& sequence);

}  // namespace kvasir::worker
