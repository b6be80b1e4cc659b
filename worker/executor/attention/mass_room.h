// How much room the launches of a step get for the attention mass of slots.
#pragma once

#include <cstdint>

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

}  // namespace kvasir::worker
