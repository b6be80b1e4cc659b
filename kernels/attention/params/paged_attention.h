// paged_attention: attention of new tokens over latents in the cache, for
// prefill chunks and decode tokens mixed in one launch. C++17.
//
// Absorbed and reconstructed attention (kernels/README.md) are one op: a score
// is the sum over the parts of the key side, an output row the parts of the
// value side, one behind the other.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "kernels/latents/latent_view.h"
#include "kernels/latents/slot_metadata.h"
#include "kernels/rowwise/rope.h"

namespace kvasir::kernels {

// A sequence's share of the launch: on the host, where it is divided, and the
// same on the device, where it runs. Slots are counted through its block table:
// slot i is slot i % P of page block_table[i / P].
struct AttentionSequence {
  int64_t first_row = 0;  // of q and out
  int64_t num_rows = 0;   // new tokens
  // Slot of the first row's own token; the others follow.
  int64_t first_slot = 0;
  DevicePtr<const int32_t> block_table;  // covers first_slot + num_rows slots
  // Table entries below this name no page (given up behind a window); their
  // slots are not visible.
  int64_t first_live_index = 0;
  // Position of every slot, for keys that are rotated when they are read
  // [first_slot + num_rows]; null: slot i has position i.
  DevicePtr<const int64_t> positions;
  // Pages of the sequence beside those of its tokens: exact rows of its sinks
  // and rings of exact windows.
  DevicePtr<const int32_t> side_pages;
  // Slots that were evicted: with as many more, the slots behind the sinks
  // would have the places of their exact rows. All slots and these are at most
  // kAttentionMostSlots.
  int64_t evicted = 0;
  // Rows before it add no attention mass; num_rows: none does.
  int64_t first_counted_row = 0;
  // Where the launch's room for weights keeps those of this sequence, of one
  // row (PlaceWeights); below 0: nowhere, and keys are scored again for its
  // mass. The same bits either way.
  int64_t weights_at = -1;
};

// Exact rows that lie one behind the other: row r is row
// (r - first_row) % rows_per_page of the sequence's side page
// first_page + (r - first_row) / rows_per_page. Bytes are counted from the
// arena of the rows' parts; another one, behind it, may hold the pages.
struct ExactSegment {
  int64_t first_row = 0;  // of it; the rows up to the next segment's follow
  int64_t first_page = 0;
  int64_t rows_per_page = 0;
  int64_t arena_bytes = 0;  // where page 0 begins
  int64_t page_bytes = 0;
  int64_t offset_bytes = 0;  // in a page, of its first row

  friend bool operator==(const ExactSegment& a, const ExactSegment& b) {
    return a.first_row == b.first_row && a.first_page == b.first_page &&
           a.rows_per_page == b.rows_per_page &&
           a.arena_bytes == b.arena_bytes && a.page_bytes == b.page_bytes &&
           a.offset_bytes == b.offset_bytes;
  }
};

// Of a side: the slots s < sinks and s > p - window that a query at slot p sees
// are read as exact rows, plain numbers beside the codes; others through the
// codec.
struct ExactSlots {
  int64_t sinks = 0;   // 0: none
  int64_t window = 0;  // 0: none
  // Rows of the slots before first_slot lie in the sequence's side pages: first
  // those of the sinks, then a ring.
  int64_t ring_rows = 0;  // at least window - 1; not 0 where there is a window
  int64_t row_bytes = 0;  // from row to row of a page
  // By first_row, from 0 on: where the views of latents are.
  const ExactSegment* segments = nullptr;
  int64_t num_segments = 0;

  KVASIR_HOST_DEVICE bool any() const { return sinks > 0 || window > 0; }
  KVASIR_HOST_DEVICE bool Has(int64_t own, int64_t slot) const {
    return slot < sinks || (window > 0 && slot > own - window);
  }
  // `evicted`: AttentionSequence's. What is evicted lies between sinks and
  // window.
  KVASIR_HOST_DEVICE int64_t RowOf(int64_t slot, int64_t evicted) const {
    if (slot < sinks) return slot;
    // (A GPU divides 64 bits by a call.)
    return sinks + static_cast<uint32_t>(slot + evicted - sinks) %
                       static_cast<uint32_t>(ring_rows);
  }
  struct Place {
    int64_t offset_bytes;  // of the row
    int64_t end_bytes;     // of its page
  };
  KVASIR_HOST_DEVICE Place PlaceOfRow(int64_t row,
                                      const int32_t* side_pages) const {
    int64_t s = 0;
    while (s + 1 < num_segments && segments[s + 1].first_row <= row) ++s;
    const ExactSegment& segment = segments[s];
    const int64_t in_segment = row - segment.first_row;
    const int64_t index = static_cast<uint32_t>(in_segment) /
                          static_cast<uint32_t>(segment.rows_per_page);
    const int64_t page =
        segment.arena_bytes +
        side_pages[segment.first_page + index] * segment.page_bytes;
    return {page + segment.offset_bytes +
                (in_segment - index * segment.rows_per_page) * row_bytes,
            page + segment.page_bytes};
  }
};

// Exact rows of a part: groups as wide as its own, numbers. A launch finds
// those of its own tokens apart, because in the ring they would take the place
// of rows that the first of them still see.
template <template <typename> class Ptr>
struct ExactRowsIn {
  LatentPartIn<Ptr> ring;   // one slot: a row, wherever it lies
  LatentPartIn<Ptr> fresh;  // one page: row r of q in slot r
};
using ExactRows = ExactRowsIn<DevicePtr>;
using ExactRowsArgs = ExactRowsIn<LaunchPtr>;

// How the keys of a part are rebuilt inside the score loop (RECONSTRUCT):
//   key_j = Rotate(up_j h + bias_j, position of the slot)
// d numbers, of which pairs are rotated and the others stay.
template <template <typename> class Ptr>
struct KeyRebuildIn {
  int64_t dims = 0;  // d
  // One matrix [d, R'] per KV head, R' of the head's group; float32. Null: the
  // latent is the key itself (whole keys or pairs of them, not yet rotated),
  // and every group has d numbers; its numbers are those that the codec stands
  // for: v, or fma(code, scale, minimum).
  const Ptr<const float>* up = nullptr;  // [Hkv]
  Ptr<const float> bias = nullptr;       // [Hkv, d], or null
  // Rotation of number pair_dims[2f] with pair_dims[2f + 1] by
  // steps[f] * position turns; num_pairs 0: keys do not rotate.
  const int32_t* pair_dims = nullptr;  // [2 * num_pairs]
  const uint64_t* steps = nullptr;     // [num_pairs], as RopeStep
  // From the steps of one KV head to those of the next (heads that keep pairs
  // of their own); 0: all heads have the same.
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
  // Where query head h's numbers of this part begin in a row of q [Hq]: as many
  // as the latent of its KV head's group has (absorbed), or d (rebuilt).
  const int64_t* query_column = nullptr;
  const KeyRebuildIn<Ptr>* rebuild = nullptr;  // null: absorbed
  const ExactRowsIn<Ptr>* exact = nullptr;     // if the keys have exact slots
};
using AttentionKeyPart = AttentionKeyPartIn<DevicePtr>;
using AttentionKeyPartArgs = AttentionKeyPartIn<LaunchPtr>;

// How the values of a part are lifted inside the loop over slots, which pays
// where many rows share them:
//   value_j = up_j^T h
// d numbers.
template <template <typename> class Ptr>
struct ValueLiftIn {
  int64_t dims = 0;  // d
  // One matrix [R', d] per KV head, R' of the head's group; float32.
  const Ptr<const float>* up = nullptr;  // [Hkv]
};
using ValueLift = ValueLiftIn<DevicePtr>;
using ValueLiftArgs = ValueLiftIn<LaunchPtr>;

template <template <typename> class Ptr>
struct AttentionValuePartIn {
  LatentPartIn<Ptr> latents;
  const int32_t* group_of_head = nullptr;  // [Hkv]
  // Where query head h's sum begins in a row of out [Hq]: as many numbers as
  // the latent of its KV head's group has (absorbed), or d (lifted).
  const int64_t* out_column = nullptr;
  const ExactRowsIn<Ptr>* exact = nullptr;  // if the values have exact slots
  const ValueLiftIn<Ptr>* lift = nullptr;   // null: absorbed
};
using AttentionValuePart = AttentionValuePartIn<DevicePtr>;
using AttentionValuePartArgs = AttentionValuePartIn<LaunchPtr>;

// Numbers of a head's sum.
template <template <typename> class Ptr>
int64_t OutWidth(const AttentionValuePartIn<Ptr>& part, int64_t group) {
  return part.lift != nullptr ? part.lift->dims
                              : part.latents.groups[group].width;
}

// What attention has to do with eviction.
struct AttentionMass {
  // Keys that are rotated when they are read turn by the position that their
  // slot has in its head's unit, not by the sequence's.
  bool stored_positions = false;
  // Rows of a launch, of which any may add mass; 0: none does.
  int64_t most_rows = 0;
  // Room for weights of sequences of one row, which need not be scored twice.
  int64_t most_weights = 0;
};

// For row r of a sequence, at slot p = first_slot + r, and query head h of KV
// head j = h / (Hq / Hkv):
//   visible slots s: s <= p, s > p - window if window > 0, live (see above);
//                    not causal: all slots up to the sequence's last new one
//   score_s = scale * sum over key parts of q[r, h] . key(s, j)
//   out[r, h] = softmax(score) . value, per value part
// The query is already rotated (and lifted, where the part is absorbed), and
// the new tokens' latents are already in the cache (exact rows in `fresh`). out
// is 0 where no slot is visible.
//
// The arithmetic, identical for every back end. The score of a part:
//   numbers: one FMA chain over the channels, from 0.
//   codes with ranges in slots: a = 0; for each run, raw = FMA chain of
//     q_c * code_c, sum = plain sum of q_c, both in channel order;
//     a = fma(raw, scale, a); a = fma(sum, minimum, a).
//   codes with levels: so, with levels[code_c] in place of code_c, and 0 as the
//     minimum.
//   codes with static ranges: the same chain over all channels with
//     q'_c = q_c * scale_c, plus the FMA chain of q_c * minimum_c. Channels of
//     0 bits have the code 0.
//   rebuilt: each of the d numbers by these rules with a row of `up` in place
//     of q (or the latent's number itself), plus bias; rotated as the op `rope`
//     does it, to the bit: (a, b) -> (fma(a, c, -(b s)), fma(b, c, a s)); then
//     one FMA chain with q.
// Parts are added in order. Slots are taken in blocks of 64 at fixed positions,
// each with an online-softmax step; every kAttentionSplitSlots slots the
// partial result is merged into the total, in order. Values of a block: for
// each channel an FMA chain over its visible slots, continuing the blocks
// before: numbers weight * v; static ranges weight * code; ranges in slots
// (weight * scale) * code and, beside it per run, the sum of weight * minimum
// (FMA chains in 16 lanes, slot s of the block in lane s % 16, then TreeSum) to
// those of the blocks before. At the end of a split the sums of minima are
// added to the channels of their run; static channels become fma(sum, scale_c,
// total weight * minimum_c) at the end of all.
// Exact slots: their scores are those of numbers. A value's chains go on over
// them with weight * v, but for static ranges, where they have a chain of their
// own, and beside the codes' there is the sum of their weights (as that of
// minima): at the end of a split the channel becomes
// fma(sum, scale_c, weights * minimum_c) + the exact rows' sum.
// Lifted values: each of the d numbers is found by the rules of scores with a
// column of `up` in place of q, an exact row's by those of numbers; then they
// are values that are numbers, whatever the codec.
// So a row's bits depend on its query and its visible slots alone: not on
// chunks, batch, page size or threads. Slots that no row of a tile sees are
// never read.
//
// Attention mass, where it is asked for (AttentionMass): for every row from the
// sequence's first_counted_row on and every query head, ascending, each visible
// slot's score in the plane of the head's unit becomes
//   S = fma(weight, Exp(block_max - max) * (1 / sum), S)
// in one chain: weight = Exp(score - block_max), block_max the greatest score
// of the split up to the slot's block, max and sum the softmax's in the end. It
// is done when all rows' sums are known, so it is the same for any chunks.
//
// Workspace does not depend on the context (but for room that is asked for to
// keep weights): at most kAttentionScratchBytes for
// each thread and, where keys are rebuilt or values lifted, kRowStateBytes for
// the queries and sums of its rows. Nothing rebuilt or decoded leaves it. With
// mass, a tile of weights more for each thread (kMassTileRows rows of a split)
// and two numbers for each head of most_rows.
//
// Tables (parts, groups, columns) are host memory: Prepare copies parts, and
// for a GPU all of them, to the device (cuda/device_attention.h); the CPU keeps
// the rest, of which it makes what its threads index.
//
// A GPU has an order of its own (cuda/paged_attention_cuda.cu) and serves
// absorbed keys and values without mass; the rest is UNIMPLEMENTED. Its
// workspace has room for results of splits besides.
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
  int64_t window = 0;  // slots that a query sees at most, its own included
  ExactSlots key_exact;
  ExactSlots value_exact;
  DType dtype = DType::kF32;              // of q and out
  SlotMetadataIn<Ptr> metadata;           // of the layer, if it may evict
  const int32_t* unit_of_head = nullptr;  // [Hkv], with metadata
  AttentionMass mass;
  // Of a GPU: its workspace has room for the results of as many splits of a
  // token's slots, of all heads; contexts beyond it are not split.
  int64_t most_partials = 4096;
  // Of a GPU: a prompt's rows have the bits that they would have alone, from
  // the kernel that decodes; otherwise the fastest kernel's.
  bool prompts_as_rows = false;
};
using PagedAttentionParams = PagedAttentionParamsIn<DevicePtr>;
using PagedAttentionArgs = PagedAttentionParamsIn<LaunchPtr>;

// Slots per online-softmax step, and per independently computed part of a long
// context. Constants of the arithmetic: changing one changes bits.
inline constexpr int64_t kAttentionBlockSlots = 64;
inline constexpr int64_t kAttentionSplitSlots = 512;
// Of a sequence, with those that were evicted: what kernels divide by in 32
// bits.
inline constexpr int64_t kAttentionMostSlots = 0x7fffffff;
// Widest latent: all KV heads of a layer in one group, at most.
inline constexpr int64_t kAttentionMaxWidth = 8192;
// Largest head that keys are rebuilt for.
inline constexpr int64_t kAttentionMaxHeadDim = 256;
// Runs of codes in a latent at most.
inline constexpr int64_t kAttentionMaxRuns = 256;
// Of one thread.
inline constexpr int64_t kAttentionScratchBytes = 256 << 10;
// What it keeps beside them of the rows of a unit of many panels from block to
// block. Keys that were rebuilt and values that were lifted serve as many rows
// as fit.
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

// What a step gives to a launch.
struct AttentionRows {
  DevicePtr<const float> q;
  DevicePtr<float> out;
  DevicePtr<const AttentionSequence> sequences;
  int64_t num_sequences = 0;
};

// How a step's sequences are divided, for all launches that are divided alike.
struct AttentionStep {
  int64_t work = 0;           // slots read by rows
  bool takes_splits = false;  // threads take splits of contexts, not units
  bool has_prompts = false;   // sequences of more than kDeviceSplitRows rows
  int64_t rows = 0;           // of q and out, up to the last one
  int64_t weights = 0;        // floats up to the last that is kept
};

class AttentionGrid;
struct AttentionDevice;
// A launch as its kernel sees it.
template <template <typename> class Ptr>
struct AttentionLaunchIn {
  const AttentionGrid* grid = nullptr;      // of this launch
  const AttentionDevice* device = nullptr;  // the same on a GPU
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
