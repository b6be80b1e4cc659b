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
  // Each sequence may have a block that is not full.
  const int64_t blocks =
      std::min(limits.max_num_seqs * (limits.most_slots / kBlock + 1),
               limits.pool_slots / kBlock + limits.max_num_seqs);
  return {.most_rows = limits.max_batched_tokens,
          .most_weights =
              std::min(most_bytes / static_cast<int64_t>(sizeof(float)),
                       blocks * kernels::KeptBlockFloats(limits.num_heads))};
}

}  // namespace kvasir::worker
