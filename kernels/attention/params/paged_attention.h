// Parameters and definition of the op paged_attention: attention of new tokens
// over latents in the cache. One launch may mix prefill chunks and decode
// tokens. C++17.
//
// The same op computes absorbed and reconstructed attention
// (kernels/README.md). A score is the sum over the key parts, and an output row
// is the concatenation of the value parts.
#pragma once

#include <cstdint>

#include "kernels/attention/params/exact_slots.h"
#include "kernels/latents/key_bias.h"
#include "kernels/latents/latent_view.h"
#include "kernels/latents/slot_metadata.h"
#include "kernels/rowwise/rope.h"

namespace kvasir::kernels {

// One sequence's share of a launch. The host has a copy, which it needs to
// divide the work, and the device has an equal copy. Slots are numbered in the
// order of the block table: the sequence's slot i is slot i % P of page
// block_table[i / P].
struct AttentionSequence {
  int64_t first_row = 0;  // first row in q and out
  int64_t num_rows = 0;   // number of new tokens
  // Slot of the first new token. The other new tokens are in the slots after
  // it.
  int64_t first_slot = 0;
  DevicePtr<const int32_t> block_table;  // covers first_slot + num_rows slots
  // Index of the first entry of block_table that still names a page. Earlier
  // pages were freed after the window passed them; their slots are not visible.
  int64_t first_live_index = 0;
  // [first_slot + num_rows]: the position of every slot. Keys that are stored
  // without rotation are rotated by these positions when they are read. Null:
  // slot i has position i.
  DevicePtr<const int64_t> positions;
  // The sequence's side pages, which it has in addition to the pages of its
  // tokens. They hold the exact rows of its sinks and windows (ExactSlots).
  DevicePtr<const int32_t> side_pages;
  // Number of evicted slots. In a window of exact rows, the slot that now has
  // number s had number s + evicted when it was written. This original number
  // determines where its exact row is. Evicted and remaining slots together
  // are at most kAttentionMostSlots.
  int64_t evicted = 0;
  // The first row that adds attention mass; num_rows if no row does.
  int64_t first_counted_row = 0;
  // Only for a sequence of one row: the offset, in floats, of the memory that
  // keeps its attention weights until the mass is added (set by PlaceWeights).
  // If negative, no weights are kept, and the keys are scored again to compute
  // the mass. Both methods give the same bits.
  int64_t weights_at = -1;
};

// How the keys of a part are rebuilt inside the score loop (RECONSTRUCT):
//   key_j = Rotate(up_j h + bias_j, position of the slot)
// Here h is the latent of a slot and key_j its key for KV head j. A key has d
// elements. Some pairs of them are rotated; the others are not.
template <template <typename> class Ptr>
struct KeyRebuildIn {
  int64_t dims = 0;  // d
  // One float32 matrix [d, R'] per KV head, where R' is the width of the head's
  // group. If null, a latent is itself the key before rotation (or those pairs
  // of the key that are stored), and every group has d channels. Codes are
  // decoded as fma(code, scale, minimum).
  const Ptr<const float>* up = nullptr;  // [Hkv]
  Ptr<const float> bias = nullptr;       // [Hkv, d], or null
  // Key elements pair_dims[2f] and pair_dims[2f + 1] are rotated by steps[f] *
  // position, in units of 2^-64 turns. If num_pairs is 0, keys are not rotated.
  const int32_t* pair_dims = nullptr;  // [2 * num_pairs]
  const uint64_t* steps = nullptr;     // as RopeStep returns them
  // If each head stores its own choice of pairs: the distance in `steps` from
  // one KV head's list to the next. 0: all heads share one list.
  int64_t head_steps_stride = 0;
  int64_t num_pairs = 0;
  float attention_factor = 1.0f;
};
using KeyRebuild = KeyRebuildIn<DevicePtr>;
using KeyRebuildArgs = KeyRebuildIn<LaunchPtr>;

template <template <typename> class Ptr>
struct AttentionKeyPartIn {
  LatentPartIn<Ptr> latents;
  const int32_t* group_of_head = nullptr;  // [Hkv]
  // [Hq]: the column in a row of q at which a query head's numbers for this
  // part begin. A query head has as many numbers as the latent of its KV head's
  // group if the part is absorbed, and d numbers if the part is rebuilt.
  const int64_t* query_column = nullptr;
  const KeyRebuildIn<Ptr>* rebuild = nullptr;  // null: absorbed
  const ExactRowsIn<Ptr>* exact = nullptr;     // null: no exact slots
};
using AttentionKeyPart = AttentionKeyPartIn<DevicePtr>;
using AttentionKeyPartArgs = AttentionKeyPartIn<LaunchPtr>;

// How the values of a part are lifted inside the loop over slots:
//   value_j = up_j^T h
// Here h is the latent of a slot and value_j its value for KV head j, which has
// d numbers. Lifting saves work if many rows read the same slots.
template <template <typename> class Ptr>
struct ValueLiftIn {
  int64_t dims = 0;  // d
  // One float32 matrix [R', d] per KV head, where R' is the width of the head's
  // group.
  const Ptr<const float>* up = nullptr;  // [Hkv]
};
using ValueLift = ValueLiftIn<DevicePtr>;
using ValueLiftArgs = ValueLiftIn<LaunchPtr>;

template <template <typename> class Ptr>
struct AttentionValuePartIn {
  LatentPartIn<Ptr> latents;
  const int32_t* group_of_head = nullptr;  // [Hkv]
  // [Hq]: the column in a row of out at which a query head's weighted sum for
  // this part begins. The sum has as many numbers as the latent of the KV
  // head's group if the part is absorbed, and d numbers if the part is lifted.
  const int64_t* out_column = nullptr;
  const ExactRowsIn<Ptr>* exact = nullptr;  // null: no exact slots
  const ValueLiftIn<Ptr>* lift = nullptr;   // null: absorbed
};
using AttentionValuePart = AttentionValuePartIn<DevicePtr>;
using AttentionValuePartArgs = AttentionValuePartIn<LaunchPtr>;

// Returns the number of columns that a query head has in a row of `out` for a
// value part.
template <template <typename> class Ptr>
int64_t OutWidth(const AttentionValuePartIn<Ptr>& part, int64_t group) {
  return part.lift != nullptr ? part.lift->dims
                              : part.latents.groups[group].width;
}

// Describes what a key bias adds to scores, if keys are stored without it
// (kernels/latents/key_bias.h). The tables are in host memory. Every KV head
// has its own group in the first key part.
struct AttentionKeyBias {
  int64_t tile_pairs = 0;   // S
  int64_t exact_pairs = 0;  // E
  // [Hkv, S + E]: the rotation steps (RopeStep) of each head's tile pairs,
  // followed by those of its exact pairs
  const uint64_t* steps = nullptr;
  // [Hq]: the column in a row of q at which the KeyBiasColumns numbers of a
  // query head for the key bias begin
  const int64_t* query_column = nullptr;
  float unit = 1.0f;  // factor of these numbers (KeyBiasParamsIn::unit)
};

// Settings for layers that evict slots by attention mass: the softmax weight
// that all queries together gave to a slot.
struct AttentionMass {
  // Where attention finds the positions of slots, which it needs to add a key
  // bias and to rotate keys that are stored without rotation. True: in the slot
  // metadata of the head's unit of eviction. False: in
  // AttentionSequence::positions.
  bool stored_positions = false;
  // The most rows of a launch that may add mass. 0: no row adds mass.
  int64_t most_rows = 0;
  // The number of floats of the workspace that keep the attention weights of
  // sequences of one row. With kept weights, keys need not be scored twice.
  int64_t most_weights = 0;
};

// For row r of a sequence, at slot p = first_slot + r, and query head h of KV
// head j = h / (Hq / Hkv):
//   visible slots s: s <= p (if not causal: s up to the last new slot),
//     s > p - window if window > 0, and s in a live page (first_live_index)
//   score_s = scale * (sum over key parts of q[r, h] . key(s, j) + key bias);
//     with a score_cap, SoftCap(score_s, score_cap) (scalar_math.h)
//   out[r, h] = softmax(score) . value, per value part
// The query is already rotated (and lifted, if the part is absorbed). The new
// tokens' latents are already in the cache, and their exact rows in `fresh`. A
// row of out is 0 if no slot is visible.
//
// The arithmetic is the same for the reference and every instruction set. An
// FMA chain adds one product after another by fused multiply-adds. The score of
// a part:
//   unquantized numbers: one FMA chain over the channels, from 0.
//   codes: for each 128 channels of a run, q_c is written as unit * n_c, where
//     n_c is an integer (DigitScale). The sum of n_c * code_c is exact, and
//     dot = fma(unit, sum, dot), one after another, from 0.
//   codes with ranges in slots: a = 0; for each run, raw = such a dot from 0,
//     sum = plain sum of q_c; a = fma(raw, scale, a); a = fma(sum, minimum, a).
//   codes with levels: as with ranges in slots, but the level's integer
//     replaces code_c, the unit is multiplied by the levels' step
//     (LevelIntegers), and the minimum is 0.
//   codes with static ranges: one dot over all runs with q'_c = q_c * scale_c
//     in place of q_c, plus the FMA chain of q_c * minimum_c. The code of a
//     channel of 0 bits is 0.
//   rebuilt: each of the d key numbers is the latent's product with a row of
//     `up` (or the latent's number itself), plus bias. The product follows the
//     rules above with the row in place of q, but codes or levels of a run are
//     multiplied in float32, in one FMA chain. The key is rotated exactly as by
//     the op `rope`, where c and s are the cosine and sine:
//       (a, b) -> (fma(a, c, -(b s)), fma(b, c, a s)).
//     The score is then one FMA chain of the key and q.
// Parts are added in order, then the key bias (latents/key_bias.h), also for
// exact slots. Let n be the slot's position, in the tile that begins at n0 and
// has the centre a. Let (c_x, s_x) be the cosine and sine of x times a pair's
// step, and u and v the query's numbers:
//   tile pairs: one number t is added. It is the sum of u c_a over all pairs
//     plus the sum of v s_a over all pairs. Both are added in one pass, by FMA
//     chains in 16 lanes, number i in lane i % 16, then TreeSum.
//   exact pairs, in order: with i = n - n0, c = fma(c_n0, c_i, -(s_n0 s_i)) and
//     s = fma(s_n0, c_i, c_n0 s_i), the score becomes fma(u, c, score), then
//     fma(v, s, score).
// Slots are taken in blocks of 64 at fixed positions, with one online-softmax
// step per block. After every kAttentionSplitSlots slots (a split), the partial
// result is merged into the total, in order.
//
// The values of a block:
//   unquantized numbers: each channel has an FMA chain of weight * v over the
//     block's visible slots, which continues the chain of the blocks before;
//   codes: for each slot that is read as codes, weight * scale (with static
//     ranges: weight) is written as unit * n_s, where n_s is an integer. For
//     each channel, the sum of n_s * code is exact, and the channel becomes
//     fma(unit, sum, channel). With levels, the level's integer replaces the
//     code, and the unit is multiplied by the levels' step.
// Ranges in slots also have, per run, the sum of weight * minimum. A block's
// part of it is computed by FMA chains in 16 lanes, with slot s of the block in
// lane s % 16, then TreeSum, and is added to the sum of the blocks before. At
// the end of a split, the sums of minima are added to the channels of their
// run. At the end of all splits, a static channel becomes fma(sum, scale_c,
// total weight * minimum_c).
//
// Exact slots: their scores are computed by the rule for unquantized numbers.
// The chain of a value channel adds their terms weight * v: sinks before the
// block's codes, the window after them. If ranges are static, however, exact
// rows have a separate chain, and the weights of the other slots are summed by
// the rule for minima. At the end of a split, the channel then becomes
// fma(sum, scale_c, weights * minimum_c) + the sum of the exact rows.
//
// Lifted values: each of the d numbers is computed by the rules for rebuilt
// keys with a column of `up` in place of a row. For an exact row, the rule for
// unquantized numbers applies. The results are then added like unquantized
// values, whatever the codec.
//
// So a row's bits depend only on its query and on the contents of its visible
// slots, not on chunks, batch, page size or threads. Slots that no row of a
// unit sees are never read.
//
// If mass.most_rows > 0, attention mass is added to S, the mass of a slot in
// the metadata of the head's unit of eviction. Only rows from the sequence's
// first_counted_row on add mass. They are added in ascending order, and the
// query heads of a row in ascending order. For each slot that a row sees:
//   S = fma(weight, Exp(block_max - max) * (1 / sum), S)
// Here weight = Exp(score - block_max), block_max is the greatest score of the
// split up to the end of the slot's block, and max and sum are the maximum and
// sum of the row's whole softmax. Mass is added after the sums of
// all rows are known, so it does not depend on how a prompt is chunked.
//
// The size of the workspace does not depend on the lengths of contexts. It has
// at most kAttentionScratchBytes per thread. If keys are rebuilt or values
// lifted, each thread also has kRowStateBytes for the queries and sums of its
// rows. Rebuilt and decoded numbers are written only to the workspace. With
// attention mass, the workspace also has most_weights floats, a tile of weights
// per thread (kMassTileRows rows of a split), and two floats for each query
// head of most_rows rows.
//
// The tables in these parameters (parts, groups, columns) are in host memory.
// For a GPU, Prepare copies them to the device (cuda/device_attention.h). For a
// CPU, it copies only the parts and makes tables for the threads
// (AttentionGrid); the other tables still belong to the caller.
//
// The GPU kernels add in another order (cuda/paged_attention_cuda.cu), so their
// bits differ. Their workspace also holds the partial results of splits, and no
// weights.
template <template <typename> class Ptr>
struct PagedAttentionParamsIn {
  Ptr<const float> q = nullptr;  // [T, ...], rows q_row_stride apart
  int64_t q_row_stride = 0;      // in elements
  Ptr<float> out = nullptr;      // [T, ...], rows out_row_stride apart
  int64_t out_row_stride = 0;
  int64_t num_heads = 0;     // Hq
  int64_t num_kv_heads = 0;  // Hkv, divides Hq
  const AttentionKeyPartIn<Ptr>* keys = nullptr;
  int64_t num_key_parts = 0;
  const AttentionValuePartIn<Ptr>* values = nullptr;
  int64_t num_value_parts = 0;
  int64_t page_tokens = 0;  // P
  const AttentionSequence* sequences = nullptr;
  int64_t num_sequences = 0;
  float scale = 1.0f;
  float score_cap = 0.0f;  // 0: scores have no cap
  bool causal = true;
  // the most slots that a query sees, including its own; 0: all
  int64_t window = 0;
  ExactSlots key_exact;
  ExactSlots value_exact;
  DType dtype = DType::kF32;     // type of q and out
  SlotMetadataIn<Ptr> metadata;  // of the layer, if it evicts slots
  // [Hkv]: each KV head's unit of eviction, if there is metadata
  const int32_t* unit_of_head = nullptr;
  AttentionMass mass;
  // Null: keys are stored with their key bias, or have none. Otherwise this
  // object and its tables belong to the caller.
  const AttentionKeyBias* key_bias = nullptr;
  // Only for a GPU: how many partial results its workspace has room for. A
  // partial result is the output of one token over one split, for all heads.
  // Sequences whose partial results do not fit are not split.
  int64_t most_partials = 4096;
  // Only for a GPU. True: the decoding kernel also computes prompts, so that
  // their rows have the same bits as single rows. False: the fastest kernel
  // computes prompts.
  bool prompts_as_rows = false;
};
using PagedAttentionParams = PagedAttentionParamsIn<DevicePtr>;
using PagedAttentionArgs = PagedAttentionParamsIn<LaunchPtr>;

// The number of slots per online-softmax step (a block), and the number of
// slots per independently computed split of a long context. Changing either
// changes the bits of results.
inline constexpr int64_t kAttentionBlockSlots = 64;
inline constexpr int64_t kAttentionSplitSlots = 512;
// The most slots of a sequence, including evicted slots. The limit exists
// because kernels divide slot numbers in 32 bits.
inline constexpr int64_t kAttentionMostSlots = 0x7fffffff;
// The most channels of a latent. The widest latents are those of a single group
// for all KV heads of a layer.
inline constexpr int64_t kAttentionMaxWidth = 8192;
// Size of the largest head whose keys can be rebuilt.
inline constexpr int64_t kAttentionMaxHeadDim = 256;
// The most runs of codes in a latent.
inline constexpr int64_t kAttentionMaxRuns = 256;
// The most bytes of scratch of one thread, without kRowStateBytes.
inline constexpr int64_t kAttentionScratchBytes = 256 << 10;
// If keys are rebuilt or values lifted, a thread uses up to this many more
// bytes to keep the queries and sums of its rows from block to block. Each
// rebuilt key or lifted value is used for all of these rows.
inline constexpr int64_t kRowStateBytes = 1 << 20;

// Slots [begin, end) that a row of a sequence sees; empty if end <= begin.
struct VisibleRange {
  int64_t begin;
  int64_t end;
};
inline VisibleRange VisibleSlots(const PagedAttentionArgs& params,
                                 const AttentionSequence& sequence,
                                 int64_t row) {
  const int64_t own = sequence.first_slot + row;
  VisibleRange range;
  range.begin = sequence.first_live_index * params.page_tokens;
  range.end = params.causal ? own + 1 : sequence.first_slot + sequence.num_rows;
  if (params.window > 0 && own + 1 - params.window > range.begin) {
    range.begin = own + 1 - params.window;
  }
  return range;
}

// The arguments that change with every step.
struct AttentionRows {
  DevicePtr<const float> q;
  DevicePtr<float> out;
  DevicePtr<const AttentionSequence> sequences;
  int64_t num_sequences = 0;
};

// How the sequences of a step are divided among threads. All launches of the
// step whose grids divide alike use the same AttentionStep.
struct AttentionStep {
  // number of slots that a row may read, summed over all rows
  int64_t work = 0;
  // True if threads take splits of contexts instead of whole units.
  bool takes_splits = false;
  // True if at least one sequence has more than kDeviceSplitRows rows.
  bool has_prompts = false;
  // the number of rows that q and out must have
  int64_t rows = 0;
  // the number of floats for kept weights that the step uses, at most
  // AttentionMass::most_weights
  int64_t weights = 0;
};

class AttentionGrid;
struct AttentionDevice;
// The arguments of a launch, as its kernel receives them.
template <template <typename> class Ptr>
struct AttentionLaunchIn {
  const AttentionGrid* grid = nullptr;      // for a CPU
  const AttentionDevice* device = nullptr;  // for a GPU
  bool takes_splits = false;
  bool has_prompts = false;
  Ptr<const float> q = nullptr;
  Ptr<float> out = nullptr;
  Ptr<const AttentionSequence> sequences = nullptr;
  int64_t sequence_count = 0;

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(q, out, sequences);
  }
};
using AttentionLaunch = AttentionLaunchIn<DevicePtr>;
using AttentionLaunchArgs = AttentionLaunchIn<LaunchPtr>;

class CpuStream;
void PagedAttentionReference(const AttentionLaunchArgs& launch, float* scratch,
                             CpuStream& stream);
void PagedAttentionSimd(const AttentionLaunchArgs& launch, float* scratch,
                        CpuStream& stream);

}  // namespace kvasir::kernels
