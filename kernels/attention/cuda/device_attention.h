// The tables that Prepare copies to a GPU for the launches of paged_attention,
// and the layout of a launch's scratch. C++17.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "kernels/attention/params/paged_attention.h"

namespace kvasir::kernels {

// The most query rows that a CTA computes together. A row is one query head of
// one token. If more query heads than this share their groups, they are divided
// into several units.
inline constexpr int64_t kDeviceTileRows = 16;
// The most output channels of a head, summed over all value parts.
inline constexpr int64_t kDeviceMostOutWidth = 1024;
// Sequences with more rows than this are prompts. Their contexts are never
// split among CTAs, because there are enough rows to keep all CTAs busy.
inline constexpr int64_t kDeviceSplitRows = 16;
// The most bytes of partial results (AttentionDevice::most_partials).
inline constexpr int64_t kDevicePartialBytes = int64_t{128} << 20;

// Where a slot stores the code of a channel (like CodePlace), and the run to
// which the channel belongs.
struct ChannelCode {
  int32_t low_bit = 0;
  int32_t high_bit = 0;
  int16_t run = 0;
  uint8_t low_bits = 0;  // 0: nothing is stored, so the code is 0
  uint8_t high_bits = 0;
};

// A key part or a value part, on the device.
struct DevicePart {
  LatentPartArgs latents;  // its lists are on the device
  ExactRowsArgs exact;     // only if these keys or values have exact slots
  const int32_t* group_of_head = nullptr;  // [Hkv]
  const int64_t* column = nullptr;         // [Hq]: column in q or out
  // The channels of group g begin at channels[first_channel[g]]. Groups of
  // plain numbers have no entries.
  const ChannelCode* channels = nullptr;
  const int64_t* first_channel = nullptr;  // [num_groups]
};

// At most kDeviceTileRows query heads that are computed together. In each part,
// all of their KV heads use the same group.
struct HeadUnit {
  int32_t first_head = 0;  // index in AttentionDevice::heads
  int32_t num_heads = 0;
};

// A chunk that tensor cores can use as an operand: neighbouring channels of a
// group, which each slot stores in whole pieces of 16 bytes.
enum class ChunkKind : uint8_t { kNumbers, kCodes8, kCodes4, kLevels4 };
struct LatentChunkOnDevice {
  const char* arena = nullptr;
  int64_t page_bytes = 0;
  int32_t tile_bytes = 0;
  int32_t tile_slots = 0;
  // In bytes: the offset of slot 0's first piece in a tile, the distance from
  // slot to slot, and the distance from piece to piece.
  int32_t codes_offset = 0;
  int32_t slot_stride = 0;
  int32_t piece_stride = 0;
  int32_t pieces = 0;
  // In bytes: the offset in a tile of the scale and minimum of the chunk's run
  // (for levels, only the scale) in slot 0, and the distance from slot to slot.
  int32_t params_offset = 0;
  int32_t params_stride = 0;
  // True if a whole block can be copied with one address per lane: tiles have
  // 64 slots, each piece (and each range) of the 64 slots is stored
  // contiguously and aligned to 16 bytes, and a chunk of numbers has an even
  // number of pieces.
  bool in_blocks = false;
  ChunkKind kind = ChunkKind::kNumbers;
  // For keys stored as codes: whether this chunk is the first one of its run,
  // and whether it is the last one, after which the sums of the run are scaled.
  bool starts_run = false;
  bool ends_run = false;
  int32_t run = 0;      // index among the runs of the unit's keys
  int32_t channel = 0;  // first channel in the group
  int32_t channels = 0;
  // For keys: the chunk's first column in a row of staged queries. For values:
  // its first column in the sums of a row.
  int32_t column = 0;
  int32_t table = 0;  // index of the levels in AttentionDevice::levels
  // For values stored as codes, as pairs of equal float16 numbers: a slot's
  // scale is limited to fma(minimum, less_scale, most_scale), or with levels to
  // most_scale. So no value of the slot exceeds 65504, the greatest float16
  // number.
  uint32_t less_scale = 0;
  uint32_t most_scale = 0;
  const int64_t* head_column = nullptr;  // [Hq], in q or out
  // The exact rows of these channels, whose numbers are contiguous. exact_ring:
  // the address of the chunk's first channel in a row that begins at offset 0
  // of the arena of the side pages. exact_fresh: the same in row 0 of the
  // launch's new tokens, with the distance between these rows.
  const char* exact_ring = nullptr;  // null: no exact rows
  const char* exact_fresh = nullptr;
  int64_t exact_fresh_stride = 0;
};
// The chunks of a unit of heads in AttentionDevice::chunks: from `first` on the
// chunks of its keys, then the chunks of its values.
struct UnitChunks {
  int32_t first = 0;
  int32_t keys = 0;
  int32_t values = 0;
};
// The most pieces of a chunk. A chunk of keys must fit into a stage of a warp,
// and the channels of a chunk of values must fit into the sums of four warps.
inline constexpr int64_t kMostKeyPieces = 8;
inline constexpr int64_t kMostNumberPieces = 8;
inline constexpr int64_t kMostCodePieces = 4;
// The kind of all chunks of a layer, or kAny if they have different kinds. The
// kernel for tensor cores has an instance for each of these values.
enum class MmaKind : uint8_t { kAny, kNumbers, kCodes8, kCodes4, kLevels4 };
// Limits of the kernel for tensor cores. The shared memory of a CTA may also
// limit a unit.
// channels of a row's query, with padding
inline constexpr int64_t kMmaMostQueries = 1024;
inline constexpr int64_t kMmaMostRuns = 64;   // runs of codes of a unit's keys
inline constexpr int64_t kMmaMostTables = 4;  // different tables of levels
// tiles of a page, and slots of a tile
inline constexpr int64_t kMmaMostPlaces = 65536;

// The data that a layer's kernels read: the parts, units and chunks, and the
// parameters that are constant after load. All pointers are device addresses.
struct AttentionDevice {
  const DevicePart* keys = nullptr;
  int64_t num_key_parts = 0;
  const DevicePart* values = nullptr;
  int64_t num_value_parts = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  const int32_t* heads = nullptr;  // [Hq]: query heads, unit by unit
  const HeadUnit* units = nullptr;
  int64_t num_units = 0;
  int32_t most_heads = 0;  // query heads of the largest unit
  int64_t tile_rows = 0;   // rows of an item of `attention`
  // tokens of an item of `attention`: as many as fit into tile_rows for any
  // unit
  int64_t tile_tokens = 0;
  // the most output channels of a head, over all value parts
  int64_t out_width = 0;
  int64_t page_tokens = 0;
  int64_t q_row_stride = 0;
  int64_t out_row_stride = 0;
  float scale = 1.0f;
  bool causal = true;
  int64_t window = 0;
  ExactSlots key_exact;
  ExactSlots value_exact;
  DType dtype = DType::kF32;
  // The chunks for tensor cores; null if tensor cores cannot be used, and then
  // the plain kernel runs.
  const LatentChunkOnDevice* chunks = nullptr;
  const UnitChunks* unit_chunks = nullptr;  // [num_units]
  // distance between rows of staged queries, in numbers
  int64_t query_stride = 0;
  const float* levels[kMmaMostTables] = {};  // [kMaxNormLevels] each
  bool levels_of_keys[kMmaMostTables] = {};
  int32_t num_tables = 0;
  MmaKind kind = MmaKind::kAny;
  int32_t warp_stage_bytes = 0;
  int32_t tile_slots = 0;     // the same for all chunks
  bool in_blocks = false;     // whether all chunks have in_blocks
  int64_t most_key_runs = 0;  // the most runs of codes that a unit's keys have
  bool has_codes = false;     // whether some chunk has codes
  bool has_exact = false;     // whether keys or values have exact slots
  // How many partial results the scratch has room for. A partial result is that
  // of one token and split, for all heads.
  int64_t most_partials = 0;
  int64_t cta_shared_bytes = 0;  // Device::cta_shared_bytes
  // The rows of an item of the kernel for prompts. 0: prompts use the decoding
  // kernel.
  int32_t prompt_rows = 0;

  // The number of floats of a partial result for one head: its sums, the
  // maximum and the sum of weights.
  KVASIR_HOST_DEVICE int64_t partial_floats() const { return out_width + 2; }
};

// MmaSharedBytes, PromptSharedBytes and PlainSharedBytes are the bytes of
// shared memory of a CTA of the decoding kernel for tensor cores, of the kernel
// for prompts (for items of `rows` rows) and of the plain kernel. MmaAttention,
// PrefillLoads and PlainAttention divide this memory.
inline constexpr int64_t kMmaWarps = 4;
inline constexpr int64_t kMmaScoreBytes = 2064;  // a row's scores of a split
inline constexpr int64_t kMmaTableBytes = 1024;
inline constexpr int64_t kMmaParamBytes = 256;  // a word per slot of a block
// the index of the CTA's next item
inline constexpr int64_t kMmaNextBytes = 16;
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
// Bytes of the tile that holds codes converted to numbers.
inline constexpr int64_t kPromptTileBytes = 16384;
// For how many slabs of 64 value channels a warp's registers hold sums, if
// items have `rows` rows.
KVASIR_HOST_DEVICE inline constexpr int64_t PromptSlabs(int64_t rows) {
  return rows > 64 ? 2 : 4;
}
// The distance between rows of staged queries, in numbers: a multiple of 128
// bytes (all banks) plus 16 bytes, which avoids bank conflicts.
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

// The entry of a sequence in a launch's scratch: its items and partial results.
// A sequence whose context is split has an item for each tile of tokens, each
// unit and each group of splits; any other sequence has an item for each tile
// and unit.
struct SequenceItems {
  int32_t first_item = 0;
  int32_t first_split = 0;
  int32_t num_splits = 0;  // splits that at least one of its rows sees
  // index of its first row among the rows of all split sequences
  int32_t first_merge = 0;
  // index of its first partial result; below 0: the context is not split
  int32_t first_partial = 0;
  int32_t item_splits = 0;  // splits per item, if the context is split
  int32_t tiles = 0;
  // index of its first item among those of the kernel for prompts
  int32_t first_prompt = 0;
  // only in the last entry: the next item that no CTA has taken
  uint32_t next_item = 0;
  uint32_t next_prompt = 0;  // the same for the kernel for prompts
};
// The floats of scratch of a launch: [num_sequences + 1] SequenceItems, of
// which the last one has the totals, followed by the partial results.
inline int64_t DeviceScratchFloats(const AttentionDevice& device,
                                   int64_t num_sequences) {
  const auto items = static_cast<int64_t>(sizeof(SequenceItems) / 4);
  return (num_sequences + 1) * items +
         device.most_partials * device.num_heads * device.partial_floats();
}

}  // namespace kvasir::kernels
