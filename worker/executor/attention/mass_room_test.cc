#include "worker/executor/attention/mass_room.h"

#include <numeric>
#include <vector>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "kernels/attention/grid/attention_mass.h"
#include "kernels/attention/ops.h"

namespace kvasir::worker {
namespace {

constexpr int64_t kHeads = 32;
constexpr int64_t kPageTokens = 64;

// Returns how many sequences keep their weights, if sequence i has one row and
// slots[i] slots.
int64_t Keeping(const MassRoomLimits& limits,
                const std::vector<int64_t>& slots) {
  std::vector<kernels::AttentionSequence> sequences(slots.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    sequences[i].num_rows = 1;
    sequences[i].first_slot = slots[i] - 1;
  }
  kernels::PlaceWeights(kHeads, RoomForMass(limits).most_weights, kPageTokens,
                        absl::MakeSpan(sequences));
  int64_t keeping = 0;
  for (const kernels::AttentionSequence& sequence : sequences) {
    keeping += kernels::KeepsWeights(sequence) ? 1 : 0;
  }
  return keeping;
}

// Returns the limits for a pool of `slots` slots. `slot_bytes` is the size of a
// slot in all layers together.
MassRoomLimits PoolOf(int64_t slots, int64_t slot_bytes) {
  return {.max_batched_tokens = 512,
          .max_num_seqs = 64,
          .most_slots = 1 << 17,
          .pool_slots = slots,
          .pool_bytes = slots * slot_bytes,
          .num_heads = kHeads};
}

TEST(MassRoomTest, EverySequenceKeepsItsAttentionWeightsEvenIfThePoolIsFull) {
  // 22 layers * (key, value) * 4 heads * (64 dims of 4 bits + 4 bytes of
  // range).
  constexpr int64_t kSlotBytes = 22 * 2 * 4 * (32 + 4);
  for (const int64_t slots : {int64_t{1} << 14, int64_t{1} << 19}) {
    std::vector<int64_t> of_sequences(64, slots / 64);
    EXPECT_EQ(Keeping(PoolOf(slots, kSlotBytes), of_sequences), 64) << slots;
    // One long sequence, and 63 short ones that leave their last block partly
    // filled.
    std::fill(of_sequences.begin(), of_sequences.end(), 65);
    of_sequences.back() = slots - 63 * 65;
    EXPECT_EQ(Keeping(PoolOf(slots, kSlotBytes), of_sequences), 64) << slots;
  }
}

TEST(MassRoomTest, KeptAttentionWeightsTakeAtMostOne32ndOfALargePool) {
  // The weights of all 2^19 slots would take 65 MiB.
  const MassRoomLimits small = PoolOf(1 << 19, 1024);
  EXPECT_EQ(RoomForMass(small).most_weights, (int64_t{32} << 20) / 4);
  EXPECT_EQ(Keeping(small, std::vector<int64_t>(64, 1 << 13)), 31);
  const MassRoomLimits large = PoolOf(1 << 19, 3072);
  EXPECT_EQ(RoomForMass(large).most_weights, (int64_t{48} << 20) / 4);
}

// Regression test: prompts, and sequences that compute tokens again after a
// preemption, were counted as kNoRoom.
TEST(ScoringTest,
     OnlySequencesWhoseAttentionWeightsDoNotFitAreCountedAsWithoutRoom) {
  std::vector<kernels::AttentionSequence> sequences(4);
  for (kernels::AttentionSequence& sequence : sequences) {
    sequence.num_rows = 1;
    sequence.first_slot = 100;
  }
  sequences[1].num_rows = 2;
  sequences[2].first_counted_row = 1;
  // There is room for two blocks, so only the first sequence keeps its weights.
  kernels::PlaceWeights(kHeads, 2 * kernels::KeptBlockFloats(kHeads),
                        kPageTokens, absl::MakeSpan(sequences));
  std::vector<ScoringKind> kinds;
  for (const kernels::AttentionSequence& sequence : sequences) {
    kinds.push_back(ScoringOf(sequence));
  }
  EXPECT_EQ(kinds, (std::vector<ScoringKind>{
                       ScoringKind::kKept, ScoringKind::kAgain,
                       ScoringKind::kAgain, ScoringKind::kNoRoom}));
}

TEST(MassRoomTest, MemoryForKeptAttentionWeightsIsNoMoreThanTheSequencesNeed) {
  MassRoomLimits limits = PoolOf(1 << 19, 8192);
  limits.max_num_seqs = 2;
  limits.most_slots = 640;
  EXPECT_EQ(RoomForMass(limits).most_weights,
            2 * 11 * kernels::KeptBlockFloats(kHeads));
  EXPECT_EQ(RoomForMass(limits).most_rows, 512);
}

}  // namespace
}  // namespace kvasir::worker
