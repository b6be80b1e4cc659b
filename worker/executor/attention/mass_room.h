// Decides how much memory a step gets for attention weights. Eviction scores a
// slot by their sum, the slot's attention mass.
#pragma once

#include <cstdint>

#include "cache/layout/layout.h"
#include "kernels/attention/params/paged_attention.h"
#include "plan/resolved_plan.h"

namespace kvasir::worker {

// The size of the memory for attention weights, in layers that evict by scores.
struct MassRoom {
  int64_t most_rows = 0;     // the most rows in one step
  int64_t most_weights = 0;  // the most weights (floats) that one step may keep
};

struct MassRoomLimits {
  int64_t max_batched_tokens = 0;
  int64_t max_num_seqs = 0;
  int64_t most_slots = 0;  // the most slots of one sequence
  // The slots of the largest page group that evicts, and the bytes of all page
  // groups together.
  int64_t pool_slots = 0;
  int64_t pool_bytes = 0;
  int64_t num_heads = 0;  // query heads of this rank
};

// Chooses the size of the memory that keeps the attention weights of sequences
// that decode. If a sequence's weights do not fit, the scores are computed from
// the keys again, which takes nearly as long as attention. So the memory has
// room for the weights of all slots of the pool, up to a limit. The limit is 32
// MiB or 1/32 of the pool, whichever is more.
MassRoom RoomForMass(const MassRoomLimits& limits);

// Sets the last three fields of `steps` for a pool of `pages` and returns the
// result. The caller must have set the first three. Lowers most_slots if the
// pool has fewer slots. `layout` must have been made for `plan`.
MassRoomLimits LimitsInPool(MassRoomLimits steps,
                            const plan::ResolvedPlan& plan,
                            const cache::PageLayout& layout,
                            const cache::PageCounts& pages);

// Bytes of MassRoom::most_weights; 0 if no layer of the plan evicts by scores.
int64_t KeptWeightBytes(const plan::ResolvedPlan& plan,
                        const MassRoomLimits& limits);

// How a launch gets the attention weights of a sequence's tokens, which it adds
// to the scores of slots.
enum class ScoringKind : uint8_t {
  kKept,  // attention has kept the weights of the sequence's only row
  // the weights are computed from the keys again, because the sequence has
  // several rows, or because its only row does not add to scores
  kAgain,
  kNoRoom,  // as kAgain, but because the weights did not fit
};
ScoringKind ScoringOf(const kernels::AttentionSequence& sequence);

}  // namespace kvasir::worker
