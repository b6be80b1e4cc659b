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

// How many sequences that have one row, and these slots, keep their weights.
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

// `slot_bytes` counts all layers.
MassRoomLimits PoolOf(int64_t slots, int64_t slot_bytes) {
  return {.max_batched_tokens = 512,
          .max_num_seqs = 64,
          .most_slots = 1 << 17,
          .pool_slots = slots,
          .pool_bytes = slots * slot_bytes,
          .num_heads = kHeads};
}

TEST(MassRoomTest, EverySequenceOfAFullPoolKeepsItsWeights) {
  // 22 layers of four heads of 64 dims in 4 bits.
  constexpr int64_t kSlotBytes = 22 * 2 * 4 * (32 + 4);
  for (const int64_t slots : {int64_t{1} << 14, int64_t{1} << 19}) {
    std::vector<int64_t> of_sequences(64, slots / 64);
    EXPECT_EQ(Keeping(PoolOf(slots, kSlotBytes), of_sequences), 64) << slots;
    // Blocks that are not full, and all sequences but one are short.
    std::fill(of_sequences.begin(), of_sequences.end(), 65);
    of_sequences.back() = slots - 63 * 65;
    EXPECT_EQ(Keeping(PoolOf(slots, kSlotBytes), of_sequences), 64) << slots;
  }
}

TEST(MassRoomTest, TakesAtMost32ndOfThePool) {
  // 2^19 slots would take 65 MiB.
  const MassRoomLimits small = PoolOf(1 << 19, 1024);
  EXPECT_EQ(RoomForMass(small).most_weights, (int64_t{32} << 20) / 4);
  EXPECT_EQ(Keeping(small, std::vector<int64_t>(64, 1 << 13)), 31);
  const MassRoomLimits large = PoolOf(1 << 19, 3072);
  EXPECT_EQ(RoomForMass(large).most_weights, (int64_t{48} << 20) / 4);
}

// Prompts and sequences that run again were once counted as rows without room.
TEST(ScoringTest, DistinguishesRowsWithoutRoomFromRowsThatNeverKeepWeights) {
  std::vector<kernels::AttentionSequence> sequences(4);
  for (kernels::AttentionSequence& sequence : sequences) {
    sequence.num_rows = 1;
    sequence.first_slot = 100;
  }
  sequences[1].num_rows = 2;
  sequences[2].first_counted_row = 1;
  // Room for two blocks: only the first sequence fits.
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

TEST(MassRoomTest, TakesNoMoreThanTheSequencesNeed) {
  MassRoomLimits limits = PoolOf(1 << 19, 8192);
  limits.max_num_seqs = 2;
  limits.most_slots = 640;
  EXPECT_EQ(RoomForMass(limits).most_weights,
            2 * 11 * kernels::KeptBlockFloats(kHeads));
  EXPECT_EQ(RoomForMass(limits).most_rows, 512);
}

}  // namespace
}  // namespace kvasir::worker
