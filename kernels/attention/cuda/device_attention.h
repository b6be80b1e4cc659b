// What a GPU's kernels know of a launch of paged_attention: the tables that
// Prepare puts on the device, and how a launch's scratch is divided. C++17.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "kernels/attention/params/paged_attention.h"

namespace kvasir::kernels {

// Query rows (a token's query head each) that a CTA computes together; heads
// beyond them are computed apart.
inline constexpr int64_t kDeviceTileRows = 16;
// Channels of all value parts of a head at most.
inline constexpr int64_t kDeviceMostOutWidth = 1024;
// Sequences of more rows are prompts: they never have their contexts split
// among CTAs, which their rows keep busy.
inline constexpr int64_t kDeviceSplitRows = 16;
// Bytes of partial results at most (AttentionDevice::most_partials).
inline constexpr int64_t kDevicePartialBytes = int64_t{128} << 20;

// Where a slot has the code of a channel, as CodePlace; of its run.
struct ChannelCode {
  int32_t low_bit = 0;
  int32_t high_bit = 0;
  int16_t run = 0;
  uint8_t low_bits = 0;  // 0: nothing is stored, the code is 0
  uint8_t high_bits = 0;
};

// A part of either side.
struct DevicePart {
  LatentPartArgs latents;  // its lists too lie on the device
  ExactRowsArgs exact;     // likewise, if the side has exact slots
  const int32_t* group_of_head = nullptr;  // [Hkv]
  const int64_t* column = nullptr;         // [Hq], of q or out
  // Of group g from first_channel[g] on; groups of numbers have none.
  const ChannelCode* channels = nullptr;
  const int64_t* first_channel = nullptr;  // [num_groups]
};

// Query heads that are computed together: at most kDeviceTileRows, whose KV
// heads have the same group in every part.
struct HeadUnit {
  int32_t first_head = 0;  // in AttentionDevice::heads
  int32_t num_heads = 0;
};

// Latents that the tensor cores take as they lie: some neighbouring channels of
// a group, in pieces of 16 bytes that all slots of a tile have.
enum class ChunkKind : uint8_t { kNumbers, kCodes8, kCodes4, kLevels4 };
struct LatentChunkOnDevice {
  const char* arena = nullptr;
  int64_t page_bytes = 0;
  int32_t tile_bytes = 0;
  int32_t tile_slots = 0;
  // In a tile: of slot 0's first piece, from slot to slot, from piece to piece.
  int32_t codes_offset = 0;
  int32_t slot_stride = 0;
  int32_t piece_stride = 0;
  int32_t pieces = 0;
  // Of the run's scale and minimum, or of the scale of levels.
  int32_t params_offset = 0;
  int32_t params_stride = 0;
  // Tiles of 64 slots, whose pieces and ranges lie side by side, at whole
  // pieces; of numbers an even count of them.
  bool in_blocks = false;
  ChunkKind kind = ChunkKind::kNumbers;
  // Of keys of codes: sums of a run begin, and are scaled.
  bool starts_run = false;
  bool ends_run = false;
  int32_t run = 0;      // among all runs of the unit's keys
  int32_t channel = 0;  // first one, of the group
  int32_t channels = 0;
  // Of keys: where the staged queries begin. Of values: the sums of a row.
  int32_t column = 0;
  int32_t table = 0;  // of levels, among AttentionDevice::levels
  // Of values of codes, as pairs of float16: the scale of a slot is at most
  // fma(minimum, less_scale, most_scale), or most_scale with levels, which
  // keeps all of its values below 65504.
  uint32_t less_scale = 0;
  uint32_t most_scale = 0;
  const int64_t* head_column = nullptr;  // [Hq], of q or out
  // Where exact rows have these channels, numbers side by side: of a row at
  // offset 0 of its arena, and of row 0 of those of the launch's own tokens.
  const char* exact_ring = nullptr;  // null: none are exact
  const char* exact_fresh = nullptr;
  int64_t exact_fresh_stride = 0;
};
// Chunks of a unit of heads: its keys', then its values'.
struct UnitChunks {
  int32_t first = 0;
  int32_t keys = 0;
  int32_t values = 0;
};
// Pieces of a chunk of keys: what a warp's stage has room for. Of values: what
// four warps sum.
inline constexpr int64_t kMostKeyPieces = 8;
inline constexpr int64_t kMostNumberPieces = 8;
inline constexpr int64_t kMostCodePieces = 4;
// What all chunks are, for which the kernel has an instance.
enum class MmaKind : uint8_t { kAny, kNumbers, kCodes8, kCodes4, kLevels4 };
// At most, for tensor cores; a unit's own are what shared memory has room for.
inline constexpr int64_t kMmaMostQueries = 1024;  // of a row, with gaps
inline constexpr int64_t kMmaMostRuns = 64;       // of a unit's keys
inline constexpr int64_t kMmaMostTables = 4;      // parts with levels
inline constexpr int64_t kMmaMostPlaces = 65536;  // tiles, slots of a tile

// Pointers are the device's.
struct AttentionDevice {
  const DevicePart* keys = nullptr;
  int64_t num_key_parts = 0;
  const DevicePart* values = nullptr;
  int64_t num_value_parts = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  const int32_t* heads = nullptr;  // [Hq], unit after unit
  const HeadUnit* units = nullptr;
  int64_t num_units = 0;
  int32_t most_heads = 0;   // of a unit
  int64_t tile_rows = 0;    // of an item of `attention`
  int64_t tile_tokens = 0;  // whose heads of any unit fit a tile
  int64_t out_width = 0;    // most numbers that a head sums
  int64_t page_tokens = 0;
  int64_t q_row_stride = 0;
  int64_t out_row_stride = 0;
  float scale = 1.0f;
  bool causal = true;
  int64_t window = 0;
  ExactSlots key_exact;
  ExactSlots value_exact;
  DType dtype = DType::kF32;
  // By tensor cores: null where a part has no chunks.
  const LatentChunkOnDevice* chunks = nullptr;
  const UnitChunks* unit_chunks = nullptr;   // [num_units]
  int64_t query_stride = 0;                  // of staged rows, in numbers
  const float* levels[kMmaMostTables] = {};  // [kMaxNormLevels] each
  bool levels_of_keys[kMmaMostTables] = {};
  int32_t num_tables = 0;
  MmaKind kind = MmaKind::kAny;
  int32_t warp_stage_bytes = 0;
  int32_t tile_slots = 0;     // of all chunks
  bool in_blocks = false;     // all chunks
  int64_t most_key_runs = 0;  // of a unit
  bool has_codes = false;     // in any chunk
  bool has_exact = false;     // slots, on either side
  // Room for results of splits: each of a token, for all heads.
  int64_t most_partials = 0;
  int64_t cta_shared_bytes = 0;  // Device's
  // Rows of an item of prompts, by the kernel for them; 0: as others.
  int32_t prompt_rows = 0;

  // Floats of one head's result: its sums, the maximum, the sum of weights.
  KVASIR_HOST_DEVICE int64_t partial_floats() const { return out_width + 2; }
};

// Bytes of shared memory that a CTA has: of the tensor cores' kernel (each
// warp's stages, scores and places; queries, factors, sums of runs, tables,
// sums), of the one for prompts, by the rows of its items, and of the plain
// one.
inline constexpr int64_t kMmaWarps = 4;
inline constexpr int64_t kMmaScoreBytes = 2064;  // of a row
inline constexpr int64_t kMmaTableBytes = 1024;
inline constexpr int64_t kMmaParamBytes = 256;  // of a stage
inline constexpr int64_t kMmaNextBytes = 16;    // the next item's number
KVASIR_HOST_DEVICE inline constexpr int64_t MmaStages(MmaKind kind) {
  return kind == MmaKind::kNumbers || kind == MmaKind::kCodes8 ? 5 : 4;
}
KVASIR_HOST_DEVICE inline int64_t MmaSharedBytes(
    const AttentionDevice& device) {
  return kMmaWarps * MmaStages(device.kind) * device.warp_stage_bytes +
         kMmaNextBytes + 8 * kAttentionSplitSlots +
         device.num_tables * kMmaTableBytes +
         device.tile_rows * (kMmaScoreBytes + 2 * device.query_stride + 16 +
                             4 * device.most_key_runs + 4 * device.out_width);
}
inline constexpr int64_t kPromptFixedBytes = 25360;
inline constexpr int64_t kPromptTileBytes = 16384;  // codes as numbers
// Slabs of 64 channels of values that a warp has sums for, with items of so
// many rows.
KVASIR_HOST_DEVICE inline constexpr int64_t PromptSlabs(int64_t rows) {
  return rows > 64 ? 2 : 4;
}
// Numbers from row to row of queries: 16 bytes beside a multiple of all banks.
KVASIR_HOST_DEVICE inline int64_t PromptQueryStride(
    const AttentionDevice& device) {
  return device.query_stride / 64 * 64 + 8;
}
KVASIR_HOST_DEVICE inline int64_t PromptSharedBytes(
    const AttentionDevice& device, int64_t rows) {
  return kPromptFixedBytes + (device.has_codes ? kPromptTileBytes : 0) +
         device.num_tables * kMmaTableBytes +
         rows * (4 * device.most_key_runs + 2 * PromptQueryStride(device));
}
inline constexpr int64_t kPlainFixedBytes = 54016;
KVASIR_HOST_DEVICE inline int64_t PlainSharedBytes(
    const AttentionDevice& device) {
  return kPlainFixedBytes + kDeviceTileRows * 4 * device.out_width;
}

// Of a launch's scratch, in the order in which it lies there. A sequence whose
// context is split has an item for each tile, unit and some splits, another one
// for each tile and unit.
struct SequenceItems {
  int32_t first_item = 0;
  int32_t first_split = 0;
  int32_t num_splits = 0;     // that any of its rows sees
  int32_t first_merge = 0;    // rows, of those of split sequences
  int32_t first_partial = 0;  // below 0: not split
  int32_t item_splits = 0;    // of an item, where they are
  int32_t tiles = 0;
  int32_t first_prompt = 0;  // item, of those of the kernel for prompts
  uint32_t next_item = 0;    // of the last: nobody has taken it
  uint32_t next_prompt = 0;  // likewise, of those for prompts
};
// Floats for `num_sequences` sequences: [num_sequences + 1] of SequenceItems,
// the last with the totals, and partials.
inline int64_t DeviceScratchFloats(const AttentionDevice& device,
                                   int64_t num_sequences) {
  const auto items = static_cast<int64_t>(sizeof(SequenceItems) / 4);
  return (num_sequences + 1) * items +
         device.most_partials * device.num_heads * device.partial_floats();
}

}  // namespace kvasir::kernels
