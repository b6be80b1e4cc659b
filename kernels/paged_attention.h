// paged_attention: attention of new tokens over the cache, for prefill chunks
// and decode tokens mixed in one launch. C++17.
#pragma once

#include <cstdint>

#include "kernels/kv_view.h"

namespace kvasir::kernels {

// A sequence's share of the launch. Slots are counted through its block table:
// slot i is slot i % P of page block_table[i / P].
struct AttentionSequence {
  int64_t first_row = 0;  // of q and out
  int64_t num_rows = 0;   // new tokens
  int64_t first_slot =
      0;  // slot of the first row's own token; the others follow
  const int32_t* block_table = nullptr;  // covers first_slot + num_rows slots
  // Table entries below this name no page (given up behind a window); their
  // slots are not visible.
  int64_t first_live_index = 0;
};

// For row r of a sequence, at slot p = first_slot + r, and query head h of KV
// head j = h / (Hq / Hkv):
//   visible slots s: s <= p, s > p - window if window > 0, live (see above);
//                    not causal: all slots up to the sequence's last new one
//   score_s = scale * q[r, h] . key(s, j);  out[r, h] = softmax(score) . value
// The query is already rotated and the new tokens' keys and values are already
// in the cache. out is 0 where no slot is visible.
//
// The arithmetic, identical for every back end: a score is one FMA chain over
// the width; slots are taken in blocks of 64 at fixed positions, each with an
// online-softmax step; every kAttentionSplitSlots slots the partial result is
// merged into the total, in order. So a row's bits depend on its query and its
// visible slots alone: not on chunks, batch, page size or threads. Slots that
// are not visible to any row of a tile are never read.
struct PagedAttentionParams {
  const float* q = nullptr;  // [T, Hq, key.width], rows q_row_stride apart
  int64_t q_row_stride = 0;  // in elements
  float* out = nullptr;      // [T, Hq, value.width]
  int64_t out_row_stride = 0;
  int64_t num_heads = 0;     // Hq
  int64_t num_kv_heads = 0;  // Hkv, divides Hq
  KvSideView key;
  KvSideView value;
  // Group of each KV head, [Hkv]; null: head j has group j.
  const int32_t* key_group = nullptr;
  const int32_t* value_group = nullptr;
  int64_t page_tokens = 0;  // P
  const AttentionSequence* sequences = nullptr;
  int64_t num_sequences = 0;
  float scale = 1.0f;
  bool causal = true;
  int64_t window = 0;  // slots that a query sees at most, its own included
};

// Slots per online-softmax step, and per independently computed part of a long
// context. Constants of the arithmetic: changing one changes bits.
inline constexpr int64_t kAttentionBlockSlots = 64;
inline constexpr int64_t kAttentionSplitSlots = 512;
// Widest key or value: bounds the scratch of a thread.
inline constexpr int64_t kAttentionMaxWidth = 256;

// Slots [begin, end) that row `row` of a sequence sees; empty if end <= begin.
struct VisibleRange {
  int64_t begin;
  int64_t end;
};
inline VisibleRange VisibleSlots(const PagedAttentionParams& params,
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

class CpuStream;
void PagedAttentionReference(const PagedAttentionParams& params, float* scratch,
                             CpuStream& stream);
void PagedAttentionSimd(const PagedAttentionParams& params, float* scratch,
                        CpuStream& stream);
// Floats of scratch that either takes for `threads` threads; does not depend on
// the context.
int64_t PagedAttentionScratch(const PagedAttentionParams& params, int threads);

}  // namespace kvasir::kernels
