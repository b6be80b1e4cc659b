// The entries of AttentionGrid's tables, and the limits by which it divides the
// work. C++17.
#pragma once

#include <cstdint>

#include "kernels/attention/params/code_digits.h"
#include "kernels/attention/params/paged_attention.h"
#include "kernels/latents/code_pack.h"

namespace kvasir::kernels {

// A thread decodes each latent in chunks. A chunk has at most this many
// channels and pieces (CodePiece).
inline constexpr int64_t kChunkChannels = 128;
inline constexpr int64_t kChunkPieces = 16;
// The digits of a row's query for a piece of codes have at most this many words
// in addition to half a word per channel (DigitWords).
inline constexpr int64_t kMostPieceWords = 18;
inline constexpr int64_t kMostChunkDigits =
    kChunkChannels / 2 + kChunkPieces * kMostPieceWords;
// A row's query for a part stays in scratch for the whole unit if it has at
// most this many 32-bit words. Wider queries are read again for each block,
// chunk by chunk.
inline constexpr int64_t kHeldQueryWidth = 512;
// Scratch keeps at most this many sums of rows of `up` (KeyRebuild) for a whole
// unit. Other sums are computed again when they are needed.
inline constexpr int64_t kHeldLiftSums = 8192;
// The largest number of rows in a panel.
inline constexpr int64_t kAttentionMaxRows = 128;
// The largest number of rows in all panels of a unit together.
inline constexpr int64_t kMostUnitRows = 2048;
// Each part has its own tile of rebuilt keys or lifted values only if scratch
// then still has room for panels of this many rows. Otherwise the parts share
// one tile, and its content must be computed again for each panel. The limit
// exists because smaller panels use only a small part of each register tile.
inline constexpr int64_t kLeastPanelRows = 8;
// Rows are divided into more units if otherwise threads would be idle for more
// than 1 / kIdleShare of the time.
inline constexpr int64_t kIdleShare = 8;
// Scratch holds the rotation angles of a block for all heads only if that
// leaves room for panels of at least this many rows.
inline constexpr int64_t kRowsWithAngles = 4;
// KV heads whose keys are rotated by the same angles are put into one unit, at
// most this many. Then the angles of a slot, which cost as much as rebuilding
// half a key, are computed only once for these heads. With more heads in a
// unit, there would be too few units for the threads.
inline constexpr int64_t kHeadsPerAngles = 4;
// KV heads with adjacent latents are put into one unit only if the unit is at
// most 1 / kUnitsPerThread of a thread's share of the work, so that threads
// stay equally busy.
inline constexpr int64_t kUnitsPerThread = 4;
// The most rows of a panel if nothing is rebuilt or lifted. More rows would
// only occupy more of the CPU cache.
inline constexpr int64_t kAbsorbedRows = 64;

// A piece: up to 128 neighbouring channels of a run of codes, which are in one
// chunk. The digits of a query for these channels share a unit
// (kDigitChannels).
struct CodePiece {
  int64_t run = 0;
  int64_t begin = 0;  // first channel
  int64_t width = 0;
  CodePlace place;  // place of the piece's first code in the slot
  // The same place, but the bits of each plane are counted from the
  // plane's ChunkBytes::begin.
  CodePlace in_chunk;
  bool starts_run = false;
  bool ends_run = false;
  // The offset, in words, of the piece's digits within the digits of a row's
  // query for the group.
  int64_t digits = 0;
};

// Returns the number of words that hold the digits of a row's query for a
// piece: a unit, a sum, and two words for every four channels, rounded up to
// whole 32-bit words of the plane with the codes' low bits.
inline int64_t DigitWords(const CodePiece& piece) {
  const int64_t per_word = 32 / piece.place.low_bits;
  const int64_t words = (piece.width + per_word - 1) / per_word;
  return 2 + 2 * words * (8 / piece.place.low_bits);
}

// The bytes of a slot that hold the codes of a chunk, for each plane of codes
// (CodePlanes).
struct ChunkBytes {
  int64_t begin[4] = {0, 0, 0, 0};
  int64_t end[4] = {0, 0, 0, 0};  // equal to `begin` if the plane has no code
  // True if all planes have the same range of bytes, which is then read once.
  bool together = false;
};

// A chunk: up to kChunkChannels neighbouring channels of a latent, which a
// thread decodes together.
struct LatentChunk {
  int64_t begin = 0;  // first channel
  int64_t width = 0;
  int64_t first_piece = 0;
  int64_t num_pieces = 0;  // 0: channels are not coded
  ChunkBytes bytes;
};

// Heads of a unit that use the same group and, if keys are rebuilt or values
// lifted, the same KV head.
struct HeadSpan {
  int64_t group;
  int64_t kv_head;
  int64_t begin;  // index among the unit's heads
  int64_t end;
};

// A slice: query heads that are computed together.
struct HeadSlice {
  int64_t first_head;  // index in AttentionGrid::heads()
  int64_t num_heads;
  // Index of the slice's first entry in AttentionGrid's lists of spans. The
  // slice has one entry for each part.
  int64_t first_spans;
  // True if each part has only one span; then UnitRows may number the rows in
  // any order.
  bool one_span_each;
};

// The layout of a thread's scratch: offsets in floats from its start.
struct AttentionScratch {
  // The tile holds a chunk of a block: decoded numbers [kChunkChannels, 64] or
  // [64, kChunkChannels], or packed words of codes [.., 64].
  int64_t tile;
  int64_t scales;  // [kChunkPieces, 64]
  int64_t minima;  // [kChunkPieces, 64]
  int64_t keys;    // [parts][d, 64]: rebuilt keys
  int64_t values;  // [parts][64, padded d]: lifted values
  // [d, 64] or [64, padded d]: products of `up` and a run of codes before the
  // run's scale is applied. With static ranges: rows of `up` times the scales.
  int64_t lift_raw;
  int64_t cosines;        // [pairs, 64]
  int64_t sines;          // [pairs, 64]
  int64_t lift_sums;      // sums of rows of `up`, one for each run
  int64_t column_sums;    // [padded d]: sums of columns of `up` over a run
  int64_t scores;         // [rows, 64]
  int64_t weight_digits;  // [rows]: digits of the weights of a block
  int64_t scores_part;    // [rows, 64]: the scores of one key part
  // [rows, 64]: scores of exact rows in a block that also has codes
  int64_t scores_exact;
  // [rows, 64]: products of queries and a run of codes before the run's scale
  // is applied
  int64_t raw;
  int64_t states;  // [panels] of PanelState
  int64_t floats;  // total number of floats
};

// The layout of a panel's state, which is kept from block to block. Members are
// offsets in floats from the start of the state.
struct PanelState {
  int64_t q;           // [parts][rows, KeyPart::held_width]
  int64_t out;         // [rows, out_width]: weighted sums of the current split
  int64_t out_minima;  // [rows, minima_width]: sums of weight * minimum
  int64_t query_sums;  // [parts][rows, runs of the part]
  int64_t key_bias;    // [rows, KeyBiasColumns]: numbers for the key bias
  int64_t max;         // [rows]
  int64_t sum;         // [rows]
  int64_t total_max;   // [rows]: maxima over the splits merged so far
  int64_t total_sum;   // [rows]
  int64_t floats;      // total number of floats
};

// A unit of work: a slice's query heads of num_queries tokens of a sequence.
struct AttentionUnit {
  const AttentionSequence* sequence;
  const HeadSlice* slice;
  int64_t query_begin;
  int64_t num_queries;
  int64_t rows() const { return slice->num_heads * num_queries; }
};

}  // namespace kvasir::kernels
