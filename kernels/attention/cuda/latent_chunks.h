// The chunks of latents that the kernels for tensor cores read. C++17.
#pragma once

#include <cstdint>

#include "kernels/attention/params/paged_attention.h"

namespace kvasir::kernels {

// A chunk: neighbouring channels of a group, which each slot stores in whole
// pieces of 16 bytes, so that tensor cores can use them as an operand.
// ChunkKind is the form of its channels: unquantized numbers, codes of 8 bits,
// of 5 or 6 bits, of 4 bits, or of at most 3 bits. Codes of at most 4 bits may
// have levels.
//
// Codes of 3, 5 and 6 bits are in two planes (LatentPart). The low plane has
// the lowest 2 or 4 bits of each code; `pieces` counts its pieces. The high
// plane has the other bits. Codes of 1 bit are treated as codes of 3 bits whose
// low bits are 0 and not stored.
enum class ChunkKind : uint8_t {
  kNumbers,
  kCodes8,
  kCodes6,
  kCodes4,
  kLevels4,
  kCodes3,
  kLevels3
};
struct LatentChunkOnDevice {
  const char* arena = nullptr;
  int64_t page_bytes = 0;
  int32_t tile_bytes = 0;
  int32_t tile_slots = 0;
  // Distances in bytes. codes_offset: from the start of a tile to slot 0's
  // first piece. slot_stride: from one slot to the next. piece_stride: from one
  // piece of a slot to the next.
  int32_t codes_offset = 0;
  int32_t slot_stride = 0;
  int32_t piece_stride = 0;
  int32_t pieces = 0;
  bool has_low = true;  // false: the codes have 0 or 1 bit
  // The high plane. high_bytes: how many of its bytes belong to a piece of the
  // low plane (0: there is no high plane). high_byte: the byte at which the
  // chunk's high bits begin in the first of `high_pieces` pieces. high_offset:
  // distance from codes_offset to this piece.
  int32_t high_bytes = 0;
  int32_t high_byte = 0;
  int32_t high_pieces = 0;
  int32_t high_offset = 0;
  // Distances in bytes. params_offset: from the start of a tile to slot 0's
  // scale and minimum for the chunk's run (with levels, only the scale).
  // params_stride: from one slot to the next.
  int32_t params_offset = 0;
  int32_t params_stride = 0;
  // True if each lane needs only one address to copy its share of a block of 64
  // slots. Tiles then have 64 slots. Each piece and each range of these slots
  // is contiguous and aligned to 16 bytes, and a chunk of numbers has an even
  // number of pieces.
  bool in_blocks = false;
  ChunkKind kind = ChunkKind::kNumbers;
  // For keys stored as codes: whether this chunk is the first or the last one
  // of its run. The run's scale is applied after the last chunk.
  bool starts_run = false;
  bool ends_run = false;
  int32_t run = 0;      // index among the runs of the unit's keys
  int32_t channel = 0;  // first channel in the group
  int32_t channels = 0;
  // For keys: the chunk's first column in a row of staged queries. For values:
  // its first column in the sums of a row.
  int32_t column = 0;
  // For keys stored as codes: the chunk's first column in the staged digits
  // (mma_digits.h). It is a multiple of 64.
  int32_t digit_column = 0;
  int32_t table = 0;  // index of the levels in AttentionDevice::levels
  // Kernels multiply integers. A code or its level is `step` times its integer.
  // level_words: the integers of the levels, one in each byte.
  uint32_t level_words[kMaxNormLevels / 4] = {};
  float step = 1.0f;
  // Static ranges: the scales and minima of the chunk's channels. Null: slots
  // have ranges. Otherwise the kernel acts as if both numbers of each slot's
  // range were 1.
  const float* channel_scales = nullptr;
  const float* channel_minima = nullptr;
  // For values stored as codes: a slot's scale is limited to fma(minimum,
  // less_scale, most_scale), or with levels to most_scale. Otherwise a decoded
  // value might exceed 65504, the greatest float16 number. less_scale and
  // most_scale are each stored as a pair of equal float16 numbers.
  uint32_t less_scale = 0;
  uint32_t most_scale = 0;
  const int64_t* head_column = nullptr;  // [Hq], in q or out
  // exact_ring: the address of these channels in an exact row at offset 0 of
  // the arena of the side pages. exact_fresh: their address in row 0 of the
  // launch's new tokens, whose rows are exact_fresh_stride bytes apart.
  const char* exact_ring = nullptr;  // null: no exact rows
  const char* exact_fresh = nullptr;
  int64_t exact_fresh_stride = 0;
};
// The chunks of a unit of heads in AttentionDevice::chunks: from index `first`
// on, there are `keys` chunks of keys and then `values` chunks of values.
struct UnitChunks {
  int32_t first = 0;
  int32_t keys = 0;
  int32_t values = 0;
};
// The most pieces of a chunk of keys, of unquantized values, and of values
// stored as codes. A chunk of keys must fit into a stage of a warp, and one of
// codes has at most kDigitChannels channels. The channels of a chunk of values
// must fit into the sums of four warps.
inline constexpr int64_t kMostKeyPieces = 8;
inline constexpr int64_t kMostKeyPieces4 = 4;  // if the codes have 4 to 6 bits
// If the codes have at most 3 bits, or if they have 6 bits and their high plane
// does not begin with a whole piece.
inline constexpr int64_t kMostKeyPieces3 = 2;
inline constexpr int64_t kMostNumberPieces = 8;
inline constexpr int64_t kMostCodePieces = 4;
// The kind of all chunks of a layer. kAny: they have different kinds, or no
// instance serves only their kind (codes of 1 to 3, 5 or 6 bits without levels,
// static ranges). The kernel for tensor cores has an instance for each value.
enum class MmaKind : uint8_t {
  kAny,
  kNumbers,
  kCodes8,
  kCodes4,
  kLevels4,
  kLevels3
};
// The kernel for tensor cores has the following limits in addition to the
// shared memory of a CTA. kMmaMostQueries: the most channels of a row's query,
// with padding.
inline constexpr int64_t kMmaMostQueries = 1024;
// The most runs of codes of a unit's keys.
inline constexpr int64_t kMmaMostRuns = 64;
inline constexpr int64_t kMmaMostTables = 4;  // most different tables of levels
// The most tiles per page, and the most slots per tile.
inline constexpr int64_t kMmaMostPlaces = 65536;

}  // namespace kvasir::kernels
