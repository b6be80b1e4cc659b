// The tables that Prepare copies to a GPU for the launches of paged_attention,
// and the layout of a launch's scratch. C++17.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "kernels/attention/cuda/latent_chunks.h"
#include "kernels/attention/params/paged_attention.h"

namespace kvasir::kernels {

// The most rows that a CTA of the decoding kernels computes together. A row is
// one query head of one token. If more query heads than this use the same
// latents, they are divided into several units.
inline constexpr int64_t kDeviceTileRows = 16;
// The most output channels of a head, summed over all value parts.
inline constexpr int64_t kDeviceMostOutWidth = 1024;
// Sequences with more rows than this are prompts. Their contexts are never
// split among CTAs, because their rows already keep all CTAs busy.
inline constexpr int64_t kDeviceSplitRows = 16;
// The most bytes that the partial results of a launch may take
// (AttentionDevice::most_partials).
inline constexpr int64_t kDevicePartialBytes = int64_t{128} << 20;

// Where the code of a channel is stored in a slot (like CodePlace), and the run
// to which the channel belongs.
struct ChannelCode {
  int32_t low_bit = 0;
  int32_t high_bit = 0;
  int16_t run = 0;
  uint8_t low_bits = 0;  // 0: nothing is stored, so the code is 0
  uint8_t high_bits = 0;
};

// How the latents of a part become keys (KeyRebuild) or values (ValueLift) of
// `dims` numbers. All pointers are device addresses.
struct DeviceLift {
  int64_t dims = 0;  // 0: the part is absorbed
  // [Hkv]: one matrix per KV head, [dims, R'] for keys and [R', dims] for
  // values. Null: a latent is itself the key before rotation.
  const float* const* up = nullptr;
  bool of_values = false;
  const float* bias = nullptr;  // [Hkv, dims], or null
  // [dims]: the order in which the numbers of a key are computed. The first
  // 2 * num_pairs are the rotated pairs. Null: in ascending order.
  const int32_t* order = nullptr;
  const uint64_t* steps = nullptr;  // as in KeyRebuild
  int64_t head_steps_stride = 0;
  int64_t num_pairs = 0;
  float attention_factor = 1.0f;
};

// A key part or a value part, on the device.
struct DevicePart {
  LatentPartArgs latents;  // its lists are on the device
  ExactRowsArgs exact;     // only if these keys or values have exact slots
  const int32_t* group_of_head = nullptr;  // [Hkv]
  const int64_t* column = nullptr;         // [Hq]: column in q or out
  // The entries of group g begin at channels[first_channel[g]]. Groups of
  // unquantized numbers have no entries.
  const ChannelCode* channels = nullptr;
  const int64_t* first_channel = nullptr;  // [num_groups]
  DeviceLift lift;
};

// Query heads that are computed together, at most kDeviceTileRows. In each
// part, all of their KV heads use the same group of latents.
struct HeadUnit {
  int32_t first_head = 0;  // index in AttentionDevice::heads
  int32_t num_heads = 0;
};

// A unit of eviction and its query heads. No HeadUnit of a layer with attention
// mass has heads of two units of eviction.
struct MassUnitOnDevice {
  int32_t unit = 0;  // index in SlotMetadata
  // The unit's HeadUnits: AttentionDevice::mass_heads [first, first + count).
  int32_t first = 0;
  int32_t count = 0;
};

// The key bias of a layer (AttentionKeyBias), on the device.
struct DeviceKeyBias {
  int32_t tile_pairs = 0;
  int32_t exact_pairs = 0;
  int32_t tile_columns = 0;         // KeyBiasTileColumns
  const uint64_t* steps = nullptr;  // [Hkv, pairs]; null: there is no key bias
  const int64_t* column = nullptr;  // [Hq], in q
  float unit = 1.0f;                // factor of a query's numbers
  // [Hkv, exact_pairs][2][kKeyBiasTile]: the cosines and sines by which a pair
  // turns from the start of a tile to each of its positions
  const float* turns = nullptr;

  // Bytes of shared memory for the angles of a split's tiles.
  KVASIR_HOST_DEVICE int64_t shared_bytes() const {
    return 8 * (kAttentionSplitSlots / kKeyBiasTile) *
           int64_t{tile_pairs + exact_pairs};
  }
};

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
  // The number of tokens of an item of `attention`. Even in the unit with the
  // most heads, these tokens have at most tile_rows rows.
  int64_t tile_tokens = 0;
  // The most output channels of a head, summed over all value parts.
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
  DeviceKeyBias key_bias;
  // The chunks for tensor cores. Null: tensor cores cannot be used, so the
  // plain kernel runs.
  const LatentChunkOnDevice* chunks = nullptr;
  const UnitChunks* unit_chunks = nullptr;  // [num_units]
  // Distance between rows of staged queries, in 16-bit numbers.
  int64_t query_stride = 0;
  // Distance in bytes between the high and the low digits of a row of staged
  // queries, and between rows of one of them. 0: no key is stored as codes.
  int64_t digit_stride = 0;
  const float* levels[kMmaMostTables] = {};  // [kMaxNormLevels] each
  bool levels_of_keys[kMmaMostTables] = {};
  int32_t num_tables = 0;
  MmaKind kind = MmaKind::kAny;
  int32_t warp_stage_bytes = 0;
  int32_t tile_slots = 0;  // the same for all chunks
  bool in_blocks = false;  // true if in_blocks of all chunks is true
  // The most chunks of codes of a unit's keys, and the most runs of codes of
  // its keys and of its values.
  int64_t most_key_chunks = 0;
  int64_t most_key_runs = 0;
  int64_t most_value_runs = 0;
  bool has_codes = false;  // true if at least one chunk has codes
  bool lifts = false;      // true if keys are rebuilt or values are lifted
  bool has_exact = false;  // true if keys or values have exact slots
  // True if the decoding kernel stages queries as 16-bit numbers, which it
  // needs for unquantized keys and exact rows.
  bool stages_numbers = false;
  // How many partial results the scratch has room for. A partial result is the
  // output of one token over one split, for all heads.
  int64_t most_partials = 0;
  int64_t cta_shared_bytes = 0;  // Device::cta_shared_bytes
  // How many rows an item of the kernel for prompts has. 0: the decoding kernel
  // computes prompts, too.
  int32_t prompt_rows = 0;
  float score_cap = 0.0f;  // 0: scores have no cap
  SlotMetadataArgs metadata;
  // AttentionMass::stored_positions, and each KV head's unit of eviction [Hkv]
  bool stored_positions = false;
  const int32_t* unit_of_head = nullptr;
  // Attention mass (attention_mass-inl.h). most_mass_rows: as
  // AttentionMass::most_rows. mass_tokens: the number of tokens of an item,
  // whose rows fit into kDeviceTileRows in every unit. mass_heads: indices of
  // HeadUnits.
  int64_t most_mass_rows = 0;
  int32_t mass_tokens = 0;
  const MassUnitOnDevice* mass_units = nullptr;
  int32_t num_mass_units = 0;
  const int32_t* mass_heads = nullptr;

  // The number of floats of a partial result for one head: its weighted sums,
  // the maximum score and the sum of weights.
  KVASIR_HOST_DEVICE int64_t partial_floats() const { return out_width + 2; }
};

// Shared memory of a CTA. MmaSharedBytes returns the bytes for the decoding
// kernel on tensor cores, PromptSharedBytes for the kernel for prompts with
// items of `rows` rows, PlainSharedBytes for the plain kernel, and
// PlainScoreBytes for the part of it that the plain kernel needs for scores and
// weights. The classes MmaAttention, PrefillLoads and PlainAttention define
// what is where in this memory.
inline constexpr int64_t kMmaWarps = 4;
// Bytes of one row's scores over a split, with padding, and bytes by which they
// grow for each run of values after the first one.
inline constexpr int64_t kMmaScoreBytes = 2064;
inline constexpr int64_t kMmaDigitBytes = 1152;
KVASIR_HOST_DEVICE inline int64_t MmaScoreBytes(const AttentionDevice& device) {
  return kMmaScoreBytes + (device.most_value_runs > 1
                               ? (device.most_value_runs - 1) * kMmaDigitBytes
                               : 0);
}
inline constexpr int64_t kMmaTableBytes = 1024;
// Bytes that hold the index of the CTA's next item, with padding.
inline constexpr int64_t kMmaNextBytes = 16;
KVASIR_HOST_DEVICE inline constexpr int64_t MmaStages(MmaKind kind) {
  return kind == MmaKind::kNumbers || kind == MmaKind::kCodes8 ? 5 : 4;
}
KVASIR_HOST_DEVICE inline int64_t MmaSharedBytes(
    const AttentionDevice& device) {
  constexpr int64_t kBlocks = kAttentionSplitSlots / kAttentionBlockSlots;
  const int64_t row_bytes =
      MmaScoreBytes(device) +
      (device.stages_numbers ? 2 * device.query_stride : 0) +
      2 * device.digit_stride + 16 + 4 * device.most_key_chunks +
      4 * device.most_key_runs + 4 * device.out_width +
      4 * (kBlocks + 1) * device.most_value_runs;
  return kMmaWarps * MmaStages(device.kind) * device.warp_stage_bytes +
         kMmaNextBytes + 8 * kAttentionSplitSlots +
         device.key_bias.shared_bytes() +
         4 * kAttentionSplitSlots *
             (device.most_key_runs + device.most_value_runs) +
         device.tile_rows * row_bytes;
}
inline constexpr int64_t kPromptFixedBytes = 25360;
// The bytes of the tile that holds the numbers converted from codes.
inline constexpr int64_t kPromptTileBytes = 16384;
// Returns how many slabs (64 value channels) a warp can sum in its registers if
// items have `rows` rows.
KVASIR_HOST_DEVICE inline constexpr int64_t PromptSlabs(int64_t rows) {
  return rows > 64 ? 2 : 4;
}
// Returns the distance between rows of staged queries, in 16-bit numbers.
// It is a multiple of 128 bytes (all banks) plus 16 bytes, which avoids
// bank conflicts.
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
// The bytes of the tile that holds rebuilt keys or lifted values.
inline constexpr int64_t kPlainLiftBytes = 16640;
KVASIR_HOST_DEVICE inline int64_t PlainScoreBytes(
    const AttentionDevice& device) {
  return kPlainFixedBytes + (device.lifts ? kPlainLiftBytes : 0) +
         device.key_bias.shared_bytes();
}
KVASIR_HOST_DEVICE inline int64_t PlainSharedBytes(
    const AttentionDevice& device) {
  return PlainScoreBytes(device) + kDeviceTileRows * 4 * device.out_width;
}
// The kernel that adds attention mass has the mass of each of an item's tokens
// and a factor for each of its rows.
KVASIR_HOST_DEVICE inline int64_t MassSharedBytes(
    const AttentionDevice& device) {
  return PlainScoreBytes(device) +
         4 * (kAttentionSplitSlots * device.mass_tokens + kDeviceTileRows);
}

// A sequence's entry in the scratch of a launch: its items and partial results.
// A sequence has one item for each tile of tokens and each unit. If its context
// is split, it has one item for each tile, unit and group of splits.
struct SequenceItems {
  int32_t first_item = 0;
  int32_t first_split = 0;
  // Number of splits with slots that at least one row of the sequence sees.
  int32_t num_splits = 0;
  // Index of the sequence's first row among the rows of all split sequences.
  int32_t first_merge = 0;
  // Index of the sequence's first partial result. Negative if its context is
  // not split.
  int32_t first_partial = 0;
  int32_t item_splits = 0;  // splits per item, if the context is split
  int32_t tiles = 0;
  // Index of the sequence's first item in the kernel for prompts.
  int32_t first_prompt = 0;
  // Only in the last entry: index of the next item that a CTA takes.
  uint32_t next_item = 0;
  uint32_t next_prompt = 0;  // next item of the kernel for prompts
};
// Returns the size of a launch's scratch, in floats. The scratch has one
// SequenceItems per sequence and one for the totals, followed by the
// partial results and by the totals of the rows that add mass
// (AttentionKernelArgs::mass_totals).
inline int64_t DeviceScratchFloats(const AttentionDevice& device,
                                   int64_t num_sequences) {
  const auto items = static_cast<int64_t>(sizeof(SequenceItems) / 4);
  return (num_sequences + 1) * items +
         device.most_partials * device.num_heads * device.partial_floats() +
         2 * device.most_mass_rows * device.num_heads;
}

}  // namespace kvasir::kernels
