#include "kernels/attention/cuda/attention_tables.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/attention/cuda/attention_chunks.h"
#include "kernels/attention/grid/key_bias_turns.h"
#include "kernels/latents/code_pack.h"

namespace kvasir::kernels {
namespace {

// The fields that key parts and value parts have in common.
struct HostPart {
  const LatentPartArgs* latents;
  const int32_t* group_of_head;
  const int64_t* column;
  const ExactRowsArgs* exact;
  const KeyRebuildArgs* rebuild = nullptr;
  const ValueLiftArgs* lift = nullptr;

  bool lifts() const { return rebuild != nullptr || lift != nullptr; }
  // Returns how many numbers a query head has in a row of q or of out.
  int64_t WidthOf(int64_t kv_head) const {
    if (rebuild != nullptr) return rebuild->dims;
    if (lift != nullptr) return lift->dims;
    return latents->groups[group_of_head[kv_head]].width;
  }
};
struct HostParts {
  std::vector<HostPart> keys;
  std::vector<HostPart> values;

  bool lift() const {
    const auto lifts = [](const HostPart& part) { return part.lifts(); };
    return std::any_of(keys.begin(), keys.end(), lifts) ||
           std::any_of(values.begin(), values.end(), lifts);
  }
};
HostParts PartsOf(const PagedAttentionArgs& params) {
  HostParts parts;
  for (int64_t p = 0; p < params.num_key_parts; ++p) {
    const AttentionKeyPartArgs& part = params.keys[p];
    parts.keys.push_back({&part.latents, part.group_of_head, part.query_column,
                          part.exact, part.rebuild});
  }
  for (int64_t p = 0; p < params.num_value_parts; ++p) {
    const AttentionValuePartArgs& part = params.values[p];
    parts.values.push_back({&part.latents, part.group_of_head, part.out_column,
                            part.exact, nullptr, part.lift});
  }
  return parts;
}

absl::Status NotServed(absl::string_view what) {
  return absl::UnimplementedError(
      absl::StrCat("paged_attention: the GPU kernels do not support ", what));
}

int64_t OutWidthOf(const std::vector<HostPart>& values, int64_t kv_head) {
  int64_t width = 0;
  for (const HostPart& part : values) {
    width += part.WidthOf(kv_head);
  }
  return width;
}
int64_t MostOutWidth(const HostParts& parts, int64_t num_kv_heads) {
  int64_t width = 0;
  for (int64_t j = 0; j < num_kv_heads; ++j) {
    width = std::max(width, OutWidthOf(parts.values, j));
  }
  return width;
}

// The units of a layer. MakeUnits forms sets of KV heads that use the same
// group in every part, and divides the query heads of each set into units. If
// keys are rebuilt or values lifted, each KV head has its own keys or values
// and therefore its own set. With attention mass, the heads of a set also
// belong to one unit of eviction (`unit_of_head`; null: there is no mass).
struct Units {
  std::vector<int32_t> heads;
  std::vector<HeadUnit> units;
};
Units MakeUnits(const HostParts& parts, int64_t num_heads, int64_t num_kv_heads,
                const int32_t* unit_of_head) {
  std::vector<std::vector<int64_t>> sets;
  std::map<std::vector<int32_t>, size_t> set_of_groups;
  for (int64_t j = 0; j < num_kv_heads; ++j) {
    std::vector<int32_t> groups;
    for (const auto* side : {&parts.keys, &parts.values}) {
      for (const HostPart& part : *side) {
        groups.push_back(part.group_of_head[j]);
      }
    }
    if (parts.lift()) groups.push_back(static_cast<int32_t>(j));
    if (unit_of_head != nullptr) groups.push_back(unit_of_head[j]);
    const auto [found, added] = set_of_groups.emplace(groups, sets.size());
    if (added) sets.emplace_back();
    sets[found->second].push_back(j);
  }
  Units made;
  const int64_t each = num_heads / num_kv_heads;
  for (const std::vector<int64_t>& set : sets) {
    const auto first = static_cast<int32_t>(made.heads.size());
    for (const int64_t j : set) {
      for (int64_t h = j * each; h < (j + 1) * each; ++h) {
        made.heads.push_back(static_cast<int32_t>(h));
      }
    }
    const auto end = static_cast<int32_t>(made.heads.size());
    constexpr auto kMost = static_cast<int32_t>(kDeviceTileRows);
    for (int32_t h = first; h < end; h += kMost) {
      made.units.push_back({h, std::min(kMost, end - h)});
    }
  }
  return made;
}

std::vector<ChannelCode> ChannelsOf(const LatentGroup& group) {
  std::vector<ChannelCode> channels;
  CodeCursor cursor(group);
  for (int64_t r = 0; r < group.num_runs; ++r) {
    CodePlace place = cursor.Next(group.runs[r]);
    for (int64_t i = 0; i < group.runs[r].width; ++i, place.Skip(1)) {
      ChannelCode channel;
      channel.low_bit = static_cast<int32_t>(place.low_bit);
      channel.high_bit = static_cast<int32_t>(place.high_bit);
      channel.run = static_cast<int16_t>(r);
      channel.low_bits = static_cast<uint8_t>(place.low_bits);
      channel.high_bits = static_cast<uint8_t>(place.high_bits);
      channels.push_back(channel);
    }
  }
  return channels;
}

template <typename T>
absl::Status Add(const std::vector<T>& host, DeviceTables* tables,
                 const T** device) {
  KVASIR_ASSIGN_OR_RETURN(const DevicePtr<const T> table, tables->Add<T>(host));
  *device = table.device_address();
  return absl::OkStatus();
}

// Copies a part's lists of groups and runs to the device.
absl::Status AddLatents(const LatentPartArgs& host, DeviceTables* tables,
                        LatentPartArgs* latents) {
  *latents = host;
  std::vector<LatentGroup> groups(host.groups, host.groups + host.num_groups);
  for (LatentGroup& group : groups) {
    KVASIR_RETURN_IF_ERROR(
        Add(std::vector<CodeRun>(group.runs, group.runs + group.num_runs),
            tables, &group.runs));
  }
  return Add(groups, tables, &latents->groups);
}

absl::Status AddExactSlots(const ExactSlots& host, DeviceTables* tables,
                           ExactSlots* slots) {
  *slots = host;
  return Add(std::vector<ExactSegment>(host.segments,
                                       host.segments + host.num_segments),
             tables, &slots->segments);
}

absl::Status AddRebuild(const HostPart& part, int64_t num_kv_heads,
                        DeviceTables* tables, DeviceLift* lift) {
  const KeyRebuildArgs& from = *part.rebuild;
  lift->dims = from.dims;
  lift->bias = from.bias;
  lift->head_steps_stride = from.head_steps_stride;
  lift->num_pairs = from.num_pairs;
  lift->attention_factor = from.attention_factor;
  std::vector<int32_t> order(from.pair_dims,
                             from.pair_dims + 2 * from.num_pairs);
  std::vector<bool> rotated(static_cast<size_t>(from.dims));
  for (const int32_t dim : order) rotated[static_cast<size_t>(dim)] = true;
  for (int32_t dim = 0; dim < from.dims; ++dim) {
    if (!rotated[static_cast<size_t>(dim)]) order.push_back(dim);
  }
  KVASIR_RETURN_IF_ERROR(Add(order, tables, &lift->order));
  if (from.num_pairs == 0) return absl::OkStatus();
  const int64_t steps =
      (num_kv_heads - 1) * from.head_steps_stride + from.num_pairs;
  return Add(std::vector<uint64_t>(from.steps, from.steps + steps), tables,
             &lift->steps);
}
absl::Status AddLift(const HostPart& part, int64_t num_kv_heads,
                     DeviceTables* tables, DeviceLift* lift) {
  const LaunchPtr<const float>* up = nullptr;
  if (part.rebuild != nullptr) {
    KVASIR_RETURN_IF_ERROR(AddRebuild(part, num_kv_heads, tables, lift));
    up = part.rebuild->up;
  } else {
    lift->dims = part.lift->dims;
    lift->of_values = true;
    up = part.lift->up;
  }
  if (up == nullptr) return absl::OkStatus();
  return Add(std::vector<const float*>(up, up + num_kv_heads), tables,
             &lift->up);
}

absl::Status AddParts(const std::vector<HostPart>& side, bool exact,
                      const PagedAttentionArgs& params, DeviceTables* tables,
                      const DevicePart** parts) {
  std::vector<DevicePart> made;
  for (const HostPart& host : side) {
    DevicePart part;
    KVASIR_RETURN_IF_ERROR(AddLatents(*host.latents, tables, &part.latents));
    if (exact) {
      KVASIR_RETURN_IF_ERROR(
          AddLatents(host.exact->ring, tables, &part.exact.ring));
      KVASIR_RETURN_IF_ERROR(
          AddLatents(host.exact->fresh, tables, &part.exact.fresh));
    }
    KVASIR_RETURN_IF_ERROR(
        Add(std::vector<int32_t>(host.group_of_head,
                                 host.group_of_head + params.num_kv_heads),
            tables, &part.group_of_head));
    KVASIR_RETURN_IF_ERROR(
        Add(std::vector<int64_t>(host.column, host.column + params.num_heads),
            tables, &part.column));
    std::vector<ChannelCode> channels;
    std::vector<int64_t> first_channel;
    for (int64_t g = 0; g < host.latents->num_groups; ++g) {
      first_channel.push_back(static_cast<int64_t>(channels.size()));
      const auto of_group = ChannelsOf(host.latents->groups[g]);
      channels.insert(channels.end(), of_group.begin(), of_group.end());
    }
    KVASIR_RETURN_IF_ERROR(Add(channels, tables, &part.channels));
    KVASIR_RETURN_IF_ERROR(Add(first_channel, tables, &part.first_channel));
    if (host.lifts()) {
      KVASIR_RETURN_IF_ERROR(
          AddLift(host, params.num_kv_heads, tables, &part.lift));
    }
    made.push_back(part);
  }
  return Add(made, tables, parts);
}

MmaKind KindOfAll(const HostChunks& made) {
  const ChunkKind first = made.chunks.front().kind;
  for (const LatentChunkOnDevice& chunk : made.chunks) {
    if (chunk.kind != first) return MmaKind::kAny;
  }
  switch (first) {
    case ChunkKind::kNumbers:
      return MmaKind::kNumbers;
    case ChunkKind::kCodes8:
      return MmaKind::kCodes8;
    case ChunkKind::kCodes4:
      return MmaKind::kCodes4;
    case ChunkKind::kLevels4:
      return MmaKind::kLevels4;
    case ChunkKind::kLevels3:
      return MmaKind::kLevels3;
    case ChunkKind::kCodes6:
    case ChunkKind::kCodes3:
      return MmaKind::kAny;
  }
  return MmaKind::kAny;
}
// Returns the size in bytes of a stage of a warp (mma_ring-inl.h). A stage must
// be able to hold each chunk of keys for 16 slots, and the warp's pieces of
// each chunk of values for 64 slots.
int32_t WarpStageBytes(const HostChunks& made) {
  constexpr int32_t kPiece = 16;
  constexpr auto kSlots = static_cast<int32_t>(kAttentionBlockSlots);
  int32_t most = 0;
  for (const UnitChunks& unit : made.units) {
    for (int32_t i = 0; i < unit.keys + unit.values; ++i) {
      const auto& chunk =
          made.chunks[static_cast<size_t>(int64_t{unit.first} + i)];
      const bool two =
          chunk.kind == ChunkKind::kNumbers || chunk.high_bytes > 0;
      const int32_t pairs =
          (chunk.pieces + 1) / 2 + (chunk.high_pieces + 1) / 2;
      const int32_t bytes = i < unit.keys ? pairs * 2 * kSlots / 4 * kPiece
                                          : (two ? 2 : 1) * kSlots * kPiece;
      most = std::max(most, bytes);
    }
  }
  return most;
}

bool OfNumbers(const LatentChunkOnDevice& chunk) {
  return chunk.kind == ChunkKind::kNumbers;
}
bool HasStaticRanges(const LatentChunkOnDevice& chunk) {
  return chunk.channel_scales != nullptr;
}
// Returns how many rows an item of the kernel for prompts may have in this
// unit. If the result is 0, sets `*why` to the reason.
int32_t PromptRows(const HostChunks& made, const UnitChunks& unit,
                   std::string* why) {
  const auto keys = made.chunks.begin() + unit.first;
  const auto values = keys + unit.keys;
  const auto end = values + unit.values;
  if (std::any_of(values, end, OfNumbers) !=
      std::all_of(values, end, OfNumbers)) {
    *why = "prompts: only some of the values are codes";
    return 0;
  }
  if (std::any_of(keys, end, [](const LatentChunkOnDevice& chunk) {
        return chunk.kind == ChunkKind::kCodes6 ||
               chunk.kind == ChunkKind::kCodes3 ||
               chunk.kind == ChunkKind::kLevels3;
      })) {
    *why = "prompts: only codes of 4 and 8 bits are supported";
    return 0;
  }
  if (std::any_of(keys, end, HasStaticRanges)) {
    *why = "prompts: codes have static ranges";
    return 0;
  }
  int64_t slabs = 0;
  std::for_each(values, end, [&](const LatentChunkOnDevice& chunk) {
    slabs += (chunk.channels + 63) / 64;
  });
  if (slabs > PromptSlabs(64)) {
    *why = absl::StrCat("prompts: values take ", slabs,
                        " slabs of 64 channels, but at most ", PromptSlabs(64),
                        " slabs are supported");
    return 0;
  }
  // If keys have at most one run of codes, its scale can be applied to the
  // scores in place. Without separate sums for each run, there are enough
  // registers for 128 rows.
  const bool scales_in_place =
      std::all_of(keys, values, OfNumbers) ||
      std::all_of(keys, values, [](const LatentChunkOnDevice& chunk) {
        return !OfNumbers(chunk) && chunk.run == 0;
      });
  return scales_in_place && slabs <= PromptSlabs(128) ? 128 : 64;
}
bool AreWholePieces(const PagedAttentionArgs& params,
                    const LatentChunkOnDevice& chunk) {
  return chunk.channel % 8 == 0 && params.q_row_stride % 8 == 0 &&
         std::all_of(chunk.head_column, chunk.head_column + params.num_heads,
                     [](int64_t column) { return column % 8 == 0; });
}
// Returns how many rows an item of the kernel for prompts may have in every
// unit, or 0 if that kernel cannot be used.
int32_t PromptRowsOfAll(const PagedAttentionArgs& params,
                        const HostChunks& made, std::string* why) {
  if (params.prompts_as_rows) {
    *why = "prompts: computed as single rows, as requested";
    return 0;
  }
  if (!(params.scale > 0.0f)) {
    *why = absl::StrCat("prompts: the scale of scores must be above 0, but is ",
                        params.scale);
    return 0;
  }
  int32_t most = params.key_bias == nullptr ? 128 : 64;
  for (const UnitChunks& unit : made.units) {
    for (int32_t k = 0; k < unit.keys; ++k) {
      const auto& chunk =
          made.chunks[static_cast<size_t>(int64_t{unit.first} + k)];
      if (AreWholePieces(params, chunk)) continue;
      *why = "prompts: queries are not in aligned pieces of 16 bytes";
      return 0;
    }
    most = std::min(most, PromptRows(made, unit, why));
  }
  return most;
}

// Copies the chunks for tensor cores to the device. If there are none, sets
// `*why` to the reason.
absl::Status AddChunks(const PagedAttentionArgs& params, const Units& units,
                       DeviceTables* tables, AttentionDevice* device,
                       std::string* why) {
  HostChunks made = MakeChunks(params, units.heads, units.units);
  *why = made.why_none;
  if (made.units.empty()) return absl::OkStatus();
  device->prompt_rows = PromptRowsOfAll(params, made, why);
  // Maps each list of head columns on the host to its copy on the device, so
  // that a list that several chunks use is copied once.
  std::map<const int64_t*, const int64_t*> columns;
  for (LatentChunkOnDevice& chunk : made.chunks) {
    const auto [found, added] = columns.emplace(chunk.head_column, nullptr);
    if (added) {
      KVASIR_RETURN_IF_ERROR(Add(
          std::vector<int64_t>(found->first, found->first + params.num_heads),
          tables, &found->second));
    }
    chunk.head_column = found->second;
  }
  for (const UnitChunks& unit : made.units) {
    for (int32_t i = 0; i < unit.keys + unit.values; ++i) {
      const auto& chunk =
          made.chunks[static_cast<size_t>(int64_t{unit.first} + i)];
      if (chunk.kind == ChunkKind::kNumbers) {
        if (i < unit.keys) device->stages_numbers = true;
        continue;
      }
      device->has_codes = true;
      int64_t& runs =
          i < unit.keys ? device->most_key_runs : device->most_value_runs;
      runs = std::max<int64_t>(runs, chunk.run + 1);
      if (i < unit.keys) {
        device->most_key_chunks =
            std::max<int64_t>(device->most_key_chunks, i + 1);
      }
    }
  }
  for (const HostChunks::Levels& levels : made.levels) {
    KVASIR_RETURN_IF_ERROR(
        Add(levels.levels, tables, &device->levels[device->num_tables]));
    device->levels_of_keys[device->num_tables++] = levels.of_keys;
  }
  device->query_stride = made.query_stride;
  device->digit_stride = made.digit_stride;
  device->has_exact = params.key_exact.any() || params.value_exact.any();
  if (device->has_exact) device->stages_numbers = true;
  device->kind = KindOfAll(made);
  // Plans store exact rows only as bfloat16 and only in addition to codes. All
  // other combinations share the kernel instance for any kind of chunks.
  if (device->has_exact &&
      (params.dtype != DType::kBf16 || device->kind == MmaKind::kNumbers)) {
    device->kind = MmaKind::kAny;
  }
  if (std::any_of(made.chunks.begin(), made.chunks.end(), HasStaticRanges)) {
    device->kind = MmaKind::kAny;
  }
  // The instance for unquantized numbers adds no key bias, because plans omit
  // the key bias only from codes.
  if (params.key_bias != nullptr && device->kind == MmaKind::kNumbers) {
    device->kind = MmaKind::kAny;
  }
  device->tile_slots = made.chunks.front().tile_slots;
  device->in_blocks = std::all_of(
      made.chunks.begin(), made.chunks.end(),
      [](const LatentChunkOnDevice& chunk) { return chunk.in_blocks; });
  device->warp_stage_bytes = WarpStageBytes(made);
  KVASIR_RETURN_IF_ERROR(Add(made.units, tables, &device->unit_chunks));
  return Add(made.chunks, tables, &device->chunks);
}

std::string TooLittleShared(absl::string_view what, int64_t bytes,
                            const AttentionDevice& device) {
  return absl::StrCat(what, " needs ", bytes,
                      " bytes of shared memory, but a CTA has only ",
                      device.cta_shared_bytes);
}

absl::Status AddKeyBias(const PagedAttentionArgs& params, DeviceTables* tables,
                        DeviceKeyBias* bias) {
  const AttentionKeyBias& from = *params.key_bias;
  bias->tile_pairs = static_cast<int32_t>(from.tile_pairs);
  bias->exact_pairs = static_cast<int32_t>(from.exact_pairs);
  bias->unit = from.unit;
  bias->tile_columns =
      static_cast<int32_t>(KeyBiasTileColumns(from.tile_pairs));
  const int64_t pairs = from.tile_pairs + from.exact_pairs;
  const std::vector<uint64_t> steps(from.steps,
                                    from.steps + params.num_kv_heads * pairs);
  KVASIR_RETURN_IF_ERROR(Add(steps, tables, &bias->steps));
  const std::vector<int64_t> columns(from.query_column,
                                     from.query_column + params.num_heads);
  KVASIR_RETURN_IF_ERROR(Add(columns, tables, &bias->column));
  return Add(KeyBiasTurns(from, params.num_kv_heads), tables, &bias->turns);
}

// Makes the tables for attention mass. The device's most_heads, lifts, key_bias
// and cta_shared_bytes must be set. An item has fewer tokens on a device whose
// CTAs have little shared memory.
absl::Status AddMass(const PagedAttentionArgs& params, const Units& units,
                     DeviceTables* tables, AttentionDevice* device) {
  device->most_mass_rows = params.mass.most_rows;
  const int64_t room =
      device->cta_shared_bytes - PlainScoreBytes(*device) - 4 * kDeviceTileRows;
  device->mass_tokens = static_cast<int32_t>(
      std::clamp<int64_t>(room / (4 * kAttentionSplitSlots), 1,
                          kDeviceTileRows / device->most_heads));
  const int64_t each = params.num_heads / params.num_kv_heads;
  std::map<int32_t, std::vector<int32_t>> of_unit;
  for (size_t u = 0; u < units.units.size(); ++u) {
    const auto first = static_cast<size_t>(units.units[u].first_head);
    of_unit[params.unit_of_head[units.heads[first] / each]].push_back(
        static_cast<int32_t>(u));
  }
  std::vector<MassUnitOnDevice> mass_units;
  std::vector<int32_t> heads;
  for (const auto& [unit, list] : of_unit) {
    mass_units.push_back({unit, static_cast<int32_t>(heads.size()),
                          static_cast<int32_t>(list.size())});
    heads.insert(heads.end(), list.begin(), list.end());
  }
  device->num_mass_units = static_cast<int32_t>(mass_units.size());
  KVASIR_RETURN_IF_ERROR(Add(mass_units, tables, &device->mass_units));
  return Add(heads, tables, &device->mass_heads);
}

// Chooses the fastest kernels whose shared memory a CTA can have. If there are
// no chunks, `kernels->why` must already have the reason.
void ChooseKernels(AttentionDevice* device, AttentionKernels* kernels) {
  const int64_t room = device->cta_shared_bytes;
  device->tile_rows =
      device->chunks != nullptr && device->most_heads <= kDeviceTileRows / 2
          ? kDeviceTileRows / 2
          : kDeviceTileRows;
  // There is only one kernel instance for 16 rows, which supports any kind of
  // chunks.
  if (device->tile_rows == kDeviceTileRows) device->kind = MmaKind::kAny;
  if (device->chunks != nullptr && MmaSharedBytes(*device) > room) {
    kernels->why = TooLittleShared("the kernel for tensor cores",
                                   MmaSharedBytes(*device), *device);
    device->chunks = nullptr;
    device->tile_rows = kDeviceTileRows;
  }
  device->tile_tokens = device->tile_rows / device->most_heads;
  if (device->chunks == nullptr) {
    device->prompt_rows = 0;
    kernels->decode = kernels->prompts = "attention_plain";
    return;
  }
  kernels->decode = kernels->prompts = "attention";
  if (!kernels->why.empty()) return;
  for (const int32_t rows : {128, 64}) {
    if (device->prompt_rows < rows) continue;
    if (PromptSharedBytes(*device, rows) > room) continue;
    device->prompt_rows = rows;
    kernels->prompts = absl::StrCat("attention_prefill of ", rows, " rows");
    return;
  }
  device->prompt_rows = 0;
  kernels->why = TooLittleShared("the kernel for prompts",
                                 PromptSharedBytes(*device, 64), *device);
}

}  // namespace

absl::Status CheckDeviceServes(const PagedAttentionArgs& params) {
  const int64_t width = MostOutWidth(PartsOf(params), params.num_kv_heads);
  if (width <= kDeviceMostOutWidth) return absl::OkStatus();
  return NotServed(absl::StrCat("values of ", width,
                                " numbers per head; the limit is ",
                                kDeviceMostOutWidth));
}

absl::StatusOr<AttentionDevice> MakeAttentionDevice(
    const PagedAttentionArgs& params, const Device& on, DeviceTables* tables,
    AttentionKernels* kernels) {
  const HostParts parts = PartsOf(params);
  AttentionDevice device;
  KVASIR_RETURN_IF_ERROR(AddParts(parts.keys, params.key_exact.any(), params,
                                  tables, &device.keys));
  device.num_key_parts = params.num_key_parts;
  KVASIR_RETURN_IF_ERROR(AddParts(parts.values, params.value_exact.any(),
                                  params, tables, &device.values));
  device.num_value_parts = params.num_value_parts;
  device.num_heads = params.num_heads;
  device.num_kv_heads = params.num_kv_heads;
  device.lifts = parts.lift();
  const bool has_mass = params.mass.most_rows > 0;
  const Units made = MakeUnits(parts, params.num_heads, params.num_kv_heads,
                               has_mass ? params.unit_of_head : nullptr);
  KVASIR_RETURN_IF_ERROR(Add(made.heads, tables, &device.heads));
  KVASIR_RETURN_IF_ERROR(Add(made.units, tables, &device.units));
  device.num_units = static_cast<int64_t>(made.units.size());
  device.most_heads = 1;
  for (const HeadUnit& unit : made.units) {
    device.most_heads = std::max(device.most_heads, unit.num_heads);
  }
  device.out_width = MostOutWidth(parts, params.num_kv_heads);
  device.page_tokens = params.page_tokens;
  device.q_row_stride = params.q_row_stride;
  device.out_row_stride = params.out_row_stride;
  device.scale = params.scale;
  device.score_cap = params.score_cap;
  device.causal = params.causal;
  device.window = params.window;
  KVASIR_RETURN_IF_ERROR(
      AddExactSlots(params.key_exact, tables, &device.key_exact));
  KVASIR_RETURN_IF_ERROR(
      AddExactSlots(params.value_exact, tables, &device.value_exact));
  device.dtype = params.dtype;
  if (params.key_bias != nullptr) {
    KVASIR_RETURN_IF_ERROR(AddKeyBias(params, tables, &device.key_bias));
  }
  if (params.metadata.num_units > 0) {
    device.metadata = params.metadata;
    device.stored_positions = params.mass.stored_positions;
    KVASIR_RETURN_IF_ERROR(
        Add(std::vector<int32_t>(params.unit_of_head,
                                 params.unit_of_head + params.num_kv_heads),
            tables, &device.unit_of_head));
  }
  device.cta_shared_bytes = on.cta_shared_bytes();
  if (has_mass) KVASIR_RETURN_IF_ERROR(AddMass(params, made, tables, &device));
  if (params.score_cap > 0.0f) {
    kernels->why = "scores have a cap";
  } else if (params.key_bias != nullptr && device.stored_positions) {
    kernels->why = "the key bias depends on positions stored in slots";
  } else {
    KVASIR_RETURN_IF_ERROR(
        AddChunks(params, made, tables, &device, &kernels->why));
  }
  ChooseKernels(&device, kernels);
  const int64_t bytes = PlainSharedBytes(device);
  if (device.chunks == nullptr && bytes > device.cta_shared_bytes) {
    return NotServed(absl::StrCat(
        "values of ", device.out_width, " numbers per head: they need ", bytes,
        " bytes of shared memory, but a CTA of device ", on.name(),
        " has only ", device.cta_shared_bytes));
  }
  if (has_mass && MassSharedBytes(device) > device.cta_shared_bytes) {
    return NotServed(TooLittleShared("attention mass, which",
                                     MassSharedBytes(device), device));
  }
  device.most_partials = std::min(
      params.most_partials,
      kDevicePartialBytes / (4 * device.num_heads * device.partial_floats()));
  return device;
}

}  // namespace kvasir::kernels
