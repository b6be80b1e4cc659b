// How much room the launches of a step get for the attention mass of slots.
#pragma once

#include <cstdint>

#include "cache/layout/layout.h"
#include "kernels/attention/params/paged_attention.h"
#include "plan/resolved_plan.h"

namespace kvasir::worker {

// What layers that evict take for the attention mass of slots.
struct MassRoom {
  int64_t most_rows = 0;     // of a step
  int64_t most_weights = 0;  // kernels::AttentionMass
};

struct MassRoomLimits {
  int64_t max_batched_tokens = 0;
  int64_t max_num_seqs = 0;
  int64_t most_slots = 0;  // of a sequence
  // Of the page group that has most, and of all groups.
  int64_t pool_slots = 0;
  int64_t pool_bytes = 0;
  int64_t num_heads = 0;  // query heads of the rank
};

// Sequences that decode keep the weights of their row as long as there is room;
// a launch scores the others' keys again, which takes nearly as long as all of
// its attention. So there is room for all slots of the pool, in blocks of
// sequences, within 32 MiB or a 32nd of the pool, whichever is more.
MassRoom RoomForMass(const MassRoomLimits& limits);

// The limits of steps (the first three; most_slots of any pool) over `pages` of
// the layout, which is the plan's.
MassRoomLimits LimitsInPool(MassRoomLimits steps,
                            const plan::ResolvedPlan& plan,
                            const cache::PageLayout& layout,
                            const cache::PageCounts& pages);

// Bytes of the room's weights; 0: no layer of the plan evicts by scores.
int64_t KeptWeightBytes(const plan::ResolvedPlan& plan,
                        const MassRoomLimits& limits);

// How a launch scores what a sequence's rows give the slots.
enum class ScoringKind : uint8_t {
  kKept,    // by the weights of its one row
  kAgain,   // by its keys, for it has several rows or none that counts
  kNoRoom,  // by its keys, for its weights have no room
};
ScoringKind ScoringOf(const kernels::AttentionSequence& sequence);

}  // namespace kvasir::worker
