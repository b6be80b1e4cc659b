// The tables of a launch of paged_attention that Prepare puts on a GPU, and how
// a launch's scratch is divided. C++17.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "kernels/attention/params/paged_attention.h"

namespace kvasir::kernels {

// The most query rows (one query head of one token each) that a CTA computes
// together. More heads than this are divided into several units.
inline constexpr int64_t kDeviceTileRows = 16;
// The most channels of all value parts of a head together.
inline constexpr int64_t kDeviceMostOutWidth = 1024;
// Sequences of more rows are prompts. Their contexts are never split among
// CTAs, because their rows are enough work for all CTAs.
inline constexpr int64_t kDeviceSplitRows = 16;
// The most bytes of partial results (AttentionDevice::most_partials).
inline constexpr int64_t kDevicePartialBytes = int64_t{128} << 20;

// Where a slot stores the code of a channel (like CodePlace), and the run of
// the channel.
struct ChannelCode {
  int32_t low_bit = 0;
  int32_t high_bit = 0;
  int16_t run = 0;
  uint8_t low_bits = 0;  // 0: nothing is stored, so the code is 0
  uint8_t high_bits = 0;
};

// A part of the keys or of the values.
struct DevicePart {
  LatentPartArgs latents;  // its lists are on the device too
  ExactRowsArgs exact;     // its exact rows, if the side has exact slots
  const int32_t* group_of_head = nullptr;  // [Hkv]
  const int64_t* column = nullptr;         // [Hq], in q or out
  // The codes of group g begin at first_channel[g]. Groups of numbers have
  // none.
  const ChannelCode* channels = nullptr;
  const int64_t* first_channel = nullptr;  // [num_groups]
};

// At most kDeviceTileRows query heads that are computed together. In each part
// their KV heads are in the same group.
struct HeadUnit {
  int32_t first_head = 0;  // index in AttentionDevice::heads
  int32_t num_heads = 0;
};

// Latents that are operands of tensor cores directly: neighbouring channels of
// a group, in pieces of 16 bytes that every slot of a tile has.
enum class ChunkKind : uint8_t { kNumbers, kCodes8, kCodes4, kLevels4 };
struct LatentChunkOnDevice {
  const char* arena = nullptr;
  int64_t page_bytes = 0;
  int32_t tile_bytes = 0;
  int32_t tile_slots = 0;
  // Offset of slot 0's first piece in a tile, distance from slot to slot, and
  // distance from piece to piece, in bytes.
  int32_t codes_offset = 0;
  int32_t slot_stride = 0;
  int32_t piece_stride = 0;
  int32_t pieces = 0;
  // The offset and stride of the run's scale and minimum, or of the scale of
  // levels.
  int32_t params_offset = 0;
  int32_t params_stride = 0;
  // True if tiles have 64 slots, the pieces and ranges of the slots are
  // adjacent and aligned to pieces, and chunks of numbers have an even number
  // of pieces.
  bool in_blocks = false;
  ChunkKind kind = ChunkKind::kNumbers;
  // For keys stored as codes: whether the sums of a run begin with this chunk,
  // and whether they are scaled after it.
  bool starts_run = false;
  bool ends_run = false;
  int32_t run = 0;      // index among the runs of the unit's keys
  int32_t channel = 0;  // first channel in the group
  int32_t channels = 0;
  // For keys: the column of the staged queries. For values: the column in the
  // sums of a row.
  int32_t column = 0;
  int32_t table = 0;  // index of the levels in AttentionDevice::levels
  // For values of codes, as pairs of float16: the scale of a slot is limited to
  // fma(minimum, less_scale, most_scale), or with levels to most_scale. This
  // keeps all of the slot's values below 65504.
  uint32_t less_scale = 0;
  uint32_t most_scale = 0;
  const int64_t* head_column = nullptr;  // [Hq], in q or out
  // The exact rows of these channels, whose numbers are contiguous: the address
  // in a row at offset 0 of the arena, and in row 0 of the rows of the launch's
  // own tokens.
  const char* exact_ring = nullptr;  // null: none are exact
  const char* exact_fresh = nullptr;
  int64_t exact_fresh_stride = 0;
};
// The chunks of a unit of heads: those of its keys, then those of its values.
struct UnitChunks {
  int32_t first = 0;
  int32_t keys = 0;
  int32_t values = 0;
};
// The most pieces of a chunk. A chunk of keys must fit a stage of a warp, and a
// chunk of values must fit the sums of four warps.
inline constexpr int64_t kMostKeyPieces = 8;
inline constexpr int64_t kMostNumberPieces = 8;
inline constexpr int64_t kMostCodePieces = 4;
// The kind of all chunks, or kAny if they have different kinds. The kernel has
// an instance for each of these values.
enum class MmaKind : uint8_t { kAny, kNumbers, kCodes8, kCodes4, kLevels4 };
// Limits of the tensor cores' kernel. A unit may also be limited by shared
// memory.
// numbers of a row's queries, with padding
inline constexpr int64_t kMmaMostQueries = 1024;
inline constexpr int64_t kMmaMostRuns = 64;       // runs of a unit's keys
inline constexpr int64_t kMmaMostTables = 4;      // parts with levels
inline constexpr int64_t kMmaMostPlaces = 65536;  // tiles, and slots of a tile

// All pointers are device addresses.
struct AttentionDevice {
  const DevicePart* keys = nullptr;
  int64_t num_key_parts = 0;
  const DevicePart* values = nullptr;
  int64_t num_value_parts = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  const int32_t* heads = nullptr;  // [Hq], unit by unit
  const HeadUnit* units = nullptr;
  int64_t num_units = 0;
  int32_t most_heads = 0;   // query heads of the largest unit
  int64_t tile_rows = 0;    // rows of an item of `attention`
  int64_t tile_tokens = 0;  // tokens of a tile: so many that the rows of any
                            // unit's heads fit tile_rows
  int64_t out_width = 0;    // the most numbers that a head sums
  int64_t page_tokens = 0;
  int64_t q_row_stride = 0;
  int64_t out_row_stride = 0;
  float scale = 1.0f;
  bool causal = true;
  int64_t window = 0;
  ExactSlots key_exact;
  ExactSlots value_exact;
  DType dtype = DType::kF32;
  // The chunks for tensor cores; null if some part has none.
  const LatentChunkOnDevice* chunks = nullptr;
  const UnitChunks* unit_chunks = nullptr;  // [num_units]
  int64_t query_stride = 0;  // distance of staged rows, in numbers
  const float* levels[kMmaMostTables] = {};  // [kMaxNormLevels] each
  bool levels_of_keys[kMmaMostTables] = {};
  int32_t num_tables = 0;
  MmaKind kind = MmaKind::kAny;
  int32_t warp_stage_bytes = 0;
  int32_t tile_slots = 0;     // the same for all chunks
  bool in_blocks = false;     // of all chunks
  int64_t most_key_runs = 0;  // of one unit
  bool has_codes = false;     // some chunk has codes
  bool has_exact = false;     // some side has exact slots
  // Room for this many results of splits. Each is of one token, for all heads.
  int64_t most_partials = 0;
  int64_t cta_shared_bytes = 0;  // Device::cta_shared_bytes
  // Rows of an item of the kernel for prompts. 0: prompts use the decoding
  // kernel.
  int32_t prompt_rows = 0;

  // The number of floats of one head's result: its sums, the maximum and the
  // sum of weights.
  KVASIR_HOST_DEVICE int64_t partial_floats() const { return out_width + 2; }
};

// Bytes of shared memory of a CTA: of the tensor cores' kernel (each warp's
// stages, scores and row places; then queries, factors, sums of runs, tables
// and sums), of the kernel for prompts (by the rows of its items), and of the
// plain kernel.
inline constexpr int64_t kMmaWarps = 4;
inline constexpr int64_t kMmaScoreBytes = 2064;  // bytes per row
inline constexpr int64_t kMmaTableBytes = 1024;
inline constexpr int64_t kMmaParamBytes = 256;  // bytes per stage
inline constexpr int64_t kMmaNextBytes = 16;    // the index of the next item
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
// Bytes of the tile of codes that were converted to numbers.
inline constexpr int64_t kPromptTileBytes = 16384;
// How many slabs of 64 value channels a warp has sums for, if items have `rows`
// rows.
KVASIR_HOST_DEVICE inline constexpr int64_t PromptSlabs(int64_t rows) {
  return rows > 64 ? 2 : 4;
}
// Distance of the rows of queries, in numbers: 16 bytes more than a multiple of
// all banks, which avoids bank conflicts.
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

// The scratch of a launch, in this order. A sequence whose context is split has
// an item for each tile, unit and group of splits; any other sequence has an
// item for each tile and unit.
struct SequenceItems {
  int32_t first_item = 0;
  int32_t first_split = 0;
  int32_t num_splits = 0;     // splits that any of its rows sees
  int32_t first_merge = 0;    // index among the rows of all split sequences
  int32_t first_partial = 0;  // below 0: the context is not split
  int32_t item_splits = 0;    // splits of one item, if the context is split
  int32_t tiles = 0;
  int32_t first_prompt = 0;  // index among the items of the kernel for prompts
  uint32_t next_item = 0;    // in the last entry: the next item that no CTA has
                             // taken
  uint32_t next_prompt = 0;  // the same for the kernel for prompts
};
// Floats of scratch for `num_sequences` sequences: [num_sequences + 1] of
// SequenceItems, the last of which has the totals, then the partial results.
inline int64_t DeviceScratchFloats(const AttentionDevice& device,
                                   int64_t num_sequences) {
  const auto items = static_cast<int64_t>(sizeof(SequenceItems) / 4);
  return (num_sequences + 1) * items +
         device.most_partials * device.num_heads * device.partial_floats();
}

}  // namespace kvasir::kernels
