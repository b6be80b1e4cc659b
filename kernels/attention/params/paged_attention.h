// paged_attention: attention of new tokens over latents in the cache. One
// launch may mix prefill chunks and decode tokens. C++17.
//
// Absorbed and reconstructed attention (kernels/README.md) are one op. A score
// is the sum over the parts of the key side. An output row is the concatenation
// of the parts of the value side.
#pragma once

#include <cstdint>

#include "kernels/attention/params/exact_slots.h"
#include "kernels/latents/latent_view.h"
#include "kernels/latents/slot_metadata.h"
#include "kernels/rowwise/rope.h"

namespace kvasir::kernels {

// One sequence's share of a launch. The host has a copy, from which the work is
// divided, and the device has an equal one. Slots are counted through the block
// table: slot i is slot i % P of page block_table[i / P].
struct AttentionSequence {
  int64_t first_row = 0;  // first row in q and out
  int64_t num_rows = 0;   // number of new tokens
  // Slot of the first row's own token. The other rows' slots follow.
  int64_t first_slot = 0;
  DevicePtr<const int32_t> block_table;  // covers first_slot + num_rows slots
  // Table entries below this index name no page, because their pages were given
  // up after the window passed them. Their slots are not visible.
  int64_t first_live_index = 0;
  // The position of every slot [first_slot + num_rows], for keys that are
  // rotated when they are read. Null: slot i has position i.
  DevicePtr<const int64_t> positions;
  // Pages that the sequence has in addition to those of its tokens. They hold
  // the exact rows of its sinks and the rings of exact windows.
  DevicePtr<const int32_t> side_pages;
  // Number of evicted slots. Adding it to a slot after the sinks gives the
  // slot's original number, which determines the place of its exact row. The
  // slots and the evicted slots together are at most kAttentionMostSlots.
  int64_t evicted = 0;
  // Rows before this one add no attention mass. If it equals num_rows, no row
  // does.
  int64_t first_counted_row = 0;
  // If the sequence has one row, the offset of its weights in the launch's room
  // for weights (PlaceWeights). Below 0: no weights are kept, and the keys are
  // scored again to compute the mass. Both ways give the same bits.
  int64_t weights_at = -1;
};

// How the keys of a part are rebuilt inside the score loop (RECONSTRUCT):
//   key_j = Rotate(up_j h + bias_j, position of the slot)
// A key has d numbers. Some pairs of them are rotated and the others stay.
template <template <typename> class Ptr>
struct KeyRebuildIn {
  int64_t dims = 0;  // d
  // One float32 matrix [d, R'] per KV head, where R' is the width of the head's
  // group. Null: the latent itself is the key (or those pairs of it that are
  // kept) before rotation, and every group has d numbers. They are the decoded
  // numbers: v, or fma(code, scale, minimum).
  const Ptr<const float>* up = nullptr;  // [Hkv]
  Ptr<const float> bias = nullptr;       // [Hkv, d], or null
  // Numbers pair_dims[2f] and pair_dims[2f + 1] are rotated by steps[f] *
  // position turns. If num_pairs is 0, keys are not rotated.
  const int32_t* pair_dims = nullptr;  // [2 * num_pairs]
  const uint64_t* steps = nullptr;     // in RopeStep's units
  // Distance from one KV head's steps to the next head's, if heads keep pairs
  // of their own. 0: all heads share one list.
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
  // The column in a row of q where the numbers of query head h for this part
  // begin [Hq]. If the part is absorbed, there are as many as the latent of the
  // KV head's group has; if it is rebuilt, d.
  const int64_t* query_column = nullptr;
  const KeyRebuildIn<Ptr>* rebuild = nullptr;  // null: absorbed
  const ExactRowsIn<Ptr>* exact = nullptr;     // if the keys have exact slots
};
using AttentionKeyPart = AttentionKeyPartIn<DevicePtr>;
using AttentionKeyPartArgs = AttentionKeyPartIn<LaunchPtr>;

// How the values of a part are lifted inside the loop over slots:
//   value_j = up_j^T h
// A value has d numbers. Lifting pays if many rows share the slots.
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
  // The column in a row of out where the sum of query head h for this part
  // begins [Hq]. If the part is absorbed, the sum has as many numbers as the
  // latent of the KV head's group; if it is lifted, d.
  const int64_t* out_column = nullptr;
  const ExactRowsIn<Ptr>* exact = nullptr;  // if the values have exact slots
  const ValueLiftIn<Ptr>* lift = nullptr;   // null: absorbed
};
using AttentionValuePart = AttentionValuePartIn<DevicePtr>;
using AttentionValuePartArgs = AttentionValuePartIn<LaunchPtr>;

// How many numbers the sum of a head has.
template <template <typename> class Ptr>
int64_t OutWidth(const AttentionValuePartIn<Ptr>& part, int64_t group) {
  return part.lift != nullptr ? part.lift->dims
                              : part.latents.groups[group].width;
}

// The settings of attention that serve eviction.
struct AttentionMass {
  // Keys that are rotated when they are read are rotated by the position that
  // their slot has in its head's unit, instead of its position in the sequence.
  bool stored_positions = false;
  // Number of rows of a launch that may add mass. 0: none does.
  int64_t most_rows = 0;
  // Room for the weights of sequences of one row, in floats, so that their keys
  // need not be scored twice.
  int64_t most_weights = 0;
};

// For row r of a sequence, at slot p = first_slot + r, and query head h of KV
// head j = h / (Hq / Hkv):
//   visible slots s: s <= p, s > p - window if window > 0, and live (see
//   above);
//                    not causal: all slots up to the sequence's last new one
//   score_s = scale * sum over key parts of q[r, h] . key(s, j)
//   out[r, h] = softmax(score) . value, per value part
// The query is already rotated (and lifted, if the part is absorbed). The new
// tokens' latents are already in the cache, and their exact rows in `fresh`. A
// row of out is 0 if no slot is visible.
//
// The arithmetic is the same for the reference and every instruction set. The
// score of a part:
//   numbers: one FMA chain over the channels, from 0.
//   codes with ranges in slots: a = 0; for each run, raw = FMA chain of
//     q_c * code_c, sum = plain sum of q_c, both in channel order;
//     a = fma(raw, scale, a); a = fma(sum, minimum, a).
//   codes with levels: as with ranges in slots, but levels[code_c] replaces
//     code_c and the minimum is 0.
//   codes with static ranges: the same chain over all channels with
//     q'_c = q_c * scale_c, plus the FMA chain of q_c * minimum_c. The code of
//     a channel of 0 bits is 0.
//   rebuilt: each of the d numbers by these rules with a row of `up` in place
//     of q (or the latent's number itself), plus bias; then rotated exactly as
//     the op `rope` does: (a, b) -> (fma(a, c, -(b s)), fma(b, c, a s)); then
//     one FMA chain with q.
// Parts are added in order. Slots are taken in blocks of 64 at fixed positions,
// with one online-softmax step per block. After every kAttentionSplitSlots
// slots (a split), the partial result is merged into the total, in order.
//
// The values of a block: each channel has one FMA chain over the block's
// visible slots, which continues the chain of the blocks before. Its terms are
//   numbers: weight * v;
//   static ranges: weight * code;
//   ranges in slots: (weight * scale) * code.
// Ranges in slots also have, per run, the sum of weight * minimum. A block's
// part of it is computed by FMA chains in 16 lanes, with slot s of the block in
// lane s % 16, then TreeSum, and is added to the sum of the blocks before. At
// the end of a split, the sums of minima are added to the channels of their
// run. At the end of all splits, a static channel becomes fma(sum, scale_c,
// total weight * minimum_c).
//
// Exact slots: their scores are those of numbers. A value's chain continues
// over them with weight * v. Static ranges are different: exact rows have a
// chain of their own, and the weights of the coded slots are summed (in the way
// that minima are). At the end of a split the channel becomes fma(sum, scale_c,
// weights * minimum_c) + the exact rows' sum.
//
// Lifted values: each of the d numbers is computed by the rules of scores with
// a column of `up` in place of q; an exact row's by the rules of numbers. The
// results are then values that are numbers, whatever the codec.
//
// So a row's bits depend only on its query and its visible slots, not on
// chunks, batch, page size or threads. Slots that no row of a tile sees are
// never read.
//
// Attention mass, if it is asked for (AttentionMass): for every row from the
// sequence's first_counted_row on and every query head, in ascending order,
// each visible slot's score in the plane of the head's unit becomes
//   S = fma(weight, Exp(block_max - max) * (1 / sum), S)
// in one chain. Here weight = Exp(score - block_max), block_max is the greatest
// score of the split up to the end of the slot's block, and max and sum are the
// final ones of the softmax. This is computed when all rows' sums are known, so
// it does not depend on how a prompt is chunked.
//
// The workspace does not depend on the context, except for the room to keep
// weights. It has at most kAttentionScratchBytes per thread and, if keys are
// rebuilt or values lifted, kRowStateBytes per thread for the queries and sums
// of its rows. Nothing rebuilt or decoded is written elsewhere. With mass, each
// thread has one more tile of weights (kMassTileRows rows of a split), and
// there are two numbers for each head of most_rows.
//
// Tables (parts, groups, columns) are host memory. For a GPU, Prepare copies
// all of them to the device (cuda/device_attention.h). For a CPU it copies the
// parts; the other tables stay the caller's, and the tables that threads index
// are made from them.
//
// A GPU has an order of operations of its own (cuda/paged_attention_cuda.cu)
// and serves absorbed keys and values without mass; anything else is
// UNIMPLEMENTED. Its workspace also has room for the results of splits.
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
  bool causal = true;
  int64_t window = 0;  // slots that a query sees at most, with its own; 0: all
  ExactSlots key_exact;
  ExactSlots value_exact;
  DType dtype = DType::kF32;              // of q and out
  SlotMetadataIn<Ptr> metadata;           // of the layer, if it may evict
  const int32_t* unit_of_head = nullptr;  // [Hkv], with metadata
  AttentionMass mass;
  // Only for a GPU: its workspace has room for the results of this many splits
  // of a token's slots, for all heads. Longer contexts are not split.
  int64_t most_partials = 4096;
  // Only for a GPU. True: a prompt's rows have the bits that they would have as
  // single rows, because the decoding kernel computes them. False: the fastest
  // kernel computes them.
  bool prompts_as_rows = false;
};
using PagedAttentionParams = PagedAttentionParamsIn<DevicePtr>;
using PagedAttentionArgs = PagedAttentionParamsIn<LaunchPtr>;

// Slots per online-softmax step, and slots per independently computed split of
// a long context. They are constants of the arithmetic: a change of either
// changes bits.
inline constexpr int64_t kAttentionBlockSlots = 64;
inline constexpr int64_t kAttentionSplitSlots = 512;
// The most slots of a sequence, including those that were evicted: kernels
// divide them in 32 bits.
inline constexpr int64_t kAttentionMostSlots = 0x7fffffff;
// Width of the widest latent: one group of all KV heads of a layer.
inline constexpr int64_t kAttentionMaxWidth = 8192;
// Size of the largest head whose keys can be rebuilt.
inline constexpr int64_t kAttentionMaxHeadDim = 256;
// The most runs of codes in a latent.
inline constexpr int64_t kAttentionMaxRuns = 256;
// The most scratch of one thread.
inline constexpr int64_t kAttentionScratchBytes = 256 << 10;
// The most bytes of state that a thread keeps from block to block, in addition
// to its scratch, for the rows of a unit of many panels. A rebuilt key or a
// lifted value serves as many rows as fit in it.
inline constexpr int64_t kRowStateBytes = 1 << 20;

// Slots [begin, end) that row `row` of a sequence sees; empty if end <= begin.
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

// How a step's sequences are divided. All launches that divide alike share it.
struct AttentionStep {
  int64_t work = 0;           // sum over rows of the slots that they read
  bool takes_splits = false;  // threads take splits of contexts, not units
  bool has_prompts = false;   // some sequence has more than kDeviceSplitRows
                              // rows
  // rows of q and out, up to the last row of the last sequence
  int64_t rows = 0;
  // floats in the room for weights, up to the last kept one
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
