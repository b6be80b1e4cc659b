// The entries of AttentionGrid's tables, and the limits that it divides by.
// C++17.
#pragma once

#include <cstdint>

#include "kernels/attention/params/paged_attention.h"
#include "kernels/latents/code_pack.h"

namespace kvasir::kernels {

// The most channels of a latent that are read into the CPU cache at a time, and
// the most pieces of runs among them.
inline constexpr int64_t kChunkChannels = 128;
inline constexpr int64_t kChunkPieces = 16;
// The widest queries of a row that stay in scratch for the whole unit. Wider
// ones are read again for each block, chunk by chunk.
inline constexpr int64_t kHeldQueryWidth = 512;
// The most sums over rows of `up` that are kept in scratch for the whole unit.
inline constexpr int64_t kHeldLiftSums = 8192;
// The most rows of a panel.
inline constexpr int64_t kAttentionMaxRows = 128;
// The most rows of all panels of a unit.
inline constexpr int64_t kMostUnitRows = 2048;
// Panels of fewer rows waste the register tile, so then several parts share the
// memory of a tile and no tile serves a second panel.
inline constexpr int64_t kLeastPanelRows = 8;
// Rows are divided into more units if more than 1 / kIdleShare of the threads'
// time would be idle.
inline constexpr int64_t kIdleShare = 8;
// Rotation angles of a block are kept for all heads only if at least this
// number of rows uses them.
inline constexpr int64_t kRowsWithAngles = 4;
// The most KV heads that are put into one unit only because their keys are
// rotated by the same angles. This makes fewer units, but saves computing
// angles, which costs as much as rebuilding half a key.
inline constexpr int64_t kHeadsPerAngles = 4;
// KV heads whose latents are adjacent in memory are put into one unit only if
// no unit becomes more than 1 / kUnitsPerThread of a thread's work.
inline constexpr int64_t kUnitsPerThread = 4;
// The most rows of a panel whose keys need no rebuilding. More rows would only
// take cache.
inline constexpr int64_t kAbsorbedRows = 64;

// The part of a run that is in one chunk.
struct CodePiece {
  int64_t run = 0;
  int64_t begin = 0;  // first channel
  int64_t width = 0;
  CodePlace place;  // of the piece's first code, in the slot
  // The same place, but each plane is counted from ChunkBytes::begin.
  CodePlace in_chunk;
  bool starts_run = false;
  bool ends_run = false;
};

// The bytes of a slot that hold the codes of a chunk, for each plane.
struct ChunkBytes {
  int64_t begin[4] = {0, 0, 0, 0};
  int64_t end[4] = {0, 0, 0, 0};  // equal to `begin` if the plane has no code
  // True if all planes have the same range of bytes, which is then read once.
  bool together = false;
};

// How vectors of 16 lanes extract the codes of 16 channels, of any bits, from a
// slot's 16-bit words. A lane looks up two words: the one with its low bits
// becomes the lower half, the one with its high bits the upper half. The low
// bits are shifted right and the high bits rotated right.
struct alignas(64) CodeLanes {
  static constexpr int64_t kChannels = 16;
  // The most bytes that a slot may have: it is looked up in two registers.
  static constexpr int64_t kMostSlotBytes = 128;

  uint32_t words[kChannels];  // two indices of words, 16 bits each
  uint32_t shifts[kChannels];
  uint32_t turns[kChannels];
  uint32_t low_mask[kChannels];
  uint32_t mask[kChannels];  // 0: no code is stored, so the code is 0
};

// A chunk: neighbouring channels that are stored in a slot.
struct LatentChunk {
  int64_t begin = 0;  // first channel
  int64_t width = 0;
  int64_t first_piece = 0;
  int64_t num_pieces = 0;  // 0: the channels are numbers
  ChunkBytes bytes;
  // Only for static ranges: CodeLanes of the channels from `lanes_begin` on.
  // They cover whole tiles of 32 columns; channels that are not in the chunk
  // are 0. num_lanes is 0 if the slot has too many bytes.
  int64_t lanes_begin = 0;
  int64_t first_lanes = 0;
  int64_t num_lanes = 0;
  int64_t slot_bytes = 0;  // of all codes of the slot
};

// Heads of a unit that use the same group and, if keys are rebuilt or values
// lifted, the same KV head.
struct HeadSpan {
  int64_t group;
  int64_t kv_head;
  int64_t begin;  // index among the unit's heads
  int64_t end;
};

// Query heads that are computed together.
struct HeadSlice {
  int64_t first_head;  // index in AttentionGrid::heads()
  int64_t num_heads;
  int64_t first_spans;  // in the grid's table of spans, which has one entry per
                        // part
  // True if each part has one span; then rows may have any order.
  bool one_span_each;
};

// Offsets in floats from the start of a thread's scratch.
struct AttentionScratch {
  // The tile: [kChunkChannels, 64], or [64, kChunkChannels], or packed words of
  // codes [.., 64].
  int64_t tile;
  int64_t scales;  // [kChunkPieces, 64]
  int64_t minima;  // [kChunkPieces, 64]
  int64_t keys;    // [parts][d, 64]: rebuilt keys
  int64_t values;  // [parts][64, padded d]: lifted values
  // [d, 64] or [64, padded d]: products of a run of codes before its scale is
  // applied; or scaled lifts
  int64_t lift_raw;
  int64_t cosines;       // [pairs, 64]
  int64_t sines;         // [pairs, 64]
  int64_t lift_sums;     // sums of runs over rows of `up`
  int64_t column_sums;   // [d]: sums of a run over columns of `up`
  int64_t scores;        // [rows, 64]
  int64_t scores_part;   // [rows, 64]: of one part; or scaled weights
  int64_t scores_exact;  // [rows, 64]: of exact rows, if a block has codes too
  int64_t raw;     // [rows, 64]: products of a run of codes before its scale
  int64_t states;  // [panels] of PanelState
  int64_t floats;  // total
};

// The state of a panel's rows that is kept from block to block. Offsets in
// floats from the start of the panel's state.
struct PanelState {
  int64_t q;           // [parts][rows, width of the part]
  int64_t out;         // [rows, out_width]: sums of the current split
  int64_t out_minima;  // [rows, minima_width]
  int64_t query_sums;  // [parts][rows, runs of the part]
  int64_t max;         // [rows]
  int64_t sum;         // [rows]
  int64_t total_max;   // [rows]: of the splits merged so far
  int64_t total_sum;   // [rows]
  int64_t floats;      // total
};

struct AttentionUnit {
  const AttentionSequence* sequence;
  const HeadSlice* slice;
  int64_t query_begin;
  int64_t num_queries;
  int64_t rows() const { return slice->num_heads * num_queries; }
};

}  // namespace kvasir::kernels
