#include "kernels/attention/params/paged_attention.h"

#include <algorithm>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/status_macros.h"
#include "kernels/attention/cuda/attention_tables.h"
#include "kernels/attention/grid/attention_tiles.h"
#include "kernels/attention/ops.h"
#include "kernels/device/dispatch.h"
#include "kernels/latents/latent_check.h"

namespace kvasir::kernels {
namespace {

constexpr OpKernels<AttentionLaunch, DevicePtr<float>> kKernels = {
    "paged_attention", &PagedAttentionReference, &PagedAttentionSimd};

absl::Status Invalid(const char* what, int64_t least, int64_t most,
                     int64_t have) {
  const std::string want =
      least == most ? absl::StrCat(least) : absl::StrCat(least, " to ", most);
  return absl::InvalidArgumentError(absl::StrCat(
      kKernels.op, ": ", what, ": must be ", want, ", but is ", have));
}

absl::Status CheckLatents(const PagedAttentionParams& params,
                          const LatentPart& part, const int32_t* group_of_head,
                          int64_t device_granule) {
  for (int64_t g = 0; g < part.num_groups; ++g) {
    const LatentGroup& group = part.groups[g];
    if (group.width > kAttentionMaxWidth) {
      return Invalid("width of a latent", 1, kAttentionMaxWidth, group.width);
    }
    if (group.num_runs > kAttentionMaxRuns) {
      return Invalid("runs of codes in a latent", 0, kAttentionMaxRuns,
                     group.num_runs);
    }
    if ((group.num_runs > 0) != (part.groups[0].num_runs > 0)) {
      return absl::InvalidArgumentError(
          absl::StrCat(kKernels.op,
                       ": all groups of a part must have codes, or none of "
                       "them; group 0 has ",
                       part.groups[0].num_runs, " runs of codes, but group ", g,
                       " has ", group.num_runs));
    }
  }
  KVASIR_RETURN_IF_ERROR(
      CheckLatentPart(kKernels.op, part, params.page_tokens, device_granule));
  for (int64_t j = 0; j < params.num_kv_heads; ++j) {
    if (group_of_head[j] < 0 || group_of_head[j] >= part.num_groups) {
      return Invalid("group_of_head of a KV head", 0, part.num_groups - 1,
                     group_of_head[j]);
    }
  }
  return absl::OkStatus();
}

absl::Status CheckRebuild(const KeyRebuild& rebuild, const LatentPart& part) {
  if (rebuild.dims < 1 || rebuild.dims > kAttentionMaxHeadDim) {
    return Invalid("dims of rebuilt keys", 1, kAttentionMaxHeadDim,
                   rebuild.dims);
  }
  for (int64_t g = 0; rebuild.up == nullptr && g < part.num_groups; ++g) {
    if (part.groups[g].width != rebuild.dims) {
      return Invalid("width of a latent that is itself the key", rebuild.dims,
                     rebuild.dims, part.groups[g].width);
    }
  }
  if (rebuild.num_pairs < 0 || 2 * rebuild.num_pairs > rebuild.dims) {
    return Invalid("pairs of rebuilt keys", 0, rebuild.dims / 2,
                   rebuild.num_pairs);
  }
  for (int64_t i = 0; i < 2 * rebuild.num_pairs; ++i) {
    if (rebuild.pair_dims[i] < 0 || rebuild.pair_dims[i] >= rebuild.dims) {
      return Invalid("pair_dims of rebuilt keys", 0, rebuild.dims - 1,
                     rebuild.pair_dims[i]);
    }
  }
  return absl::OkStatus();
}

absl::Status CheckLift(const ValueLift& lift) {
  if (lift.dims < 1 || lift.dims > kAttentionMaxHeadDim) {
    return Invalid("dims of lifted values", 1, kAttentionMaxHeadDim, lift.dims);
  }
  if (lift.up != nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(kKernels.op,
                   ": the values of a part are lifted, so it must have the "
                   "matrices `up`, but has none"));
}

absl::Status CheckSegment(const ExactSegment& segment, int64_t row_bytes,
                          int64_t least_first_row) {
  const std::pair<const char*, std::pair<int64_t, int64_t>> counts[] = {
      {"first_row of a segment of exact rows",
       {least_first_row, segment.first_row}},
      {"rows_per_page of exact rows", {1, segment.rows_per_page}},
      {"first_page of exact rows", {0, segment.first_page}},
      {"arena_bytes of exact rows", {0, segment.arena_bytes}},
      {"offset_bytes of exact rows", {0, segment.offset_bytes}},
      {"page_bytes of side pages", {segment.offset_bytes, segment.page_bytes}}};
  for (const auto& [what, want_have] : counts) {
    const auto& [want, have] = want_have;
    if (have < want) return Refuse(kKernels.op, what, want, have);
  }
  // Divides instead of multiplying, because rows_per_page * row_bytes may not
  // fit into 64 bits.
  const int64_t room = segment.page_bytes - segment.offset_bytes;
  if (segment.rows_per_page <= room / row_bytes) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      kKernels.op, ": a side page of ", segment.page_bytes,
      " bytes has no room for ", segment.rows_per_page, " exact rows of ",
      row_bytes, " bytes each, the first at byte ", segment.offset_bytes));
}

absl::Status CheckExactSlots(const ExactSlots& slots) {
  if (slots.sinks < 0) return Refuse(kKernels.op, "sinks", 0, slots.sinks);
  if (slots.window < 0) {
    return Refuse(kKernels.op, "exact window", 0, slots.window);
  }
  if (!slots.any()) return absl::OkStatus();
  const int64_t ring_rows =
      slots.window == 0 ? 0 : std::max<int64_t>(1, slots.window - 1);
  if (slots.ring_rows < ring_rows) {
    return Refuse(kKernels.op, "ring_rows of exact rows", ring_rows,
                  slots.ring_rows);
  }
  if (slots.num_segments < 1) {
    return Refuse(kKernels.op, "segments of exact rows", 1, slots.num_segments);
  }
  if (slots.row_bytes < 1) {
    return Refuse(kKernels.op, "row_bytes", 1, slots.row_bytes);
  }
  int64_t least_first = 0;
  for (int64_t s = 0; s < slots.num_segments; ++s) {
    KVASIR_RETURN_IF_ERROR(
        CheckSegment(slots.segments[s], slots.row_bytes, least_first));
    least_first = slots.segments[s].first_row + 1;
  }
  return slots.segments[0].first_row == 0
             ? absl::OkStatus()
             : Invalid("first_row of the first segment of exact rows", 0, 0,
                       slots.segments[0].first_row);
}

// Checks that the numbers of exact rows are aligned: the distances and offsets
// of the rows must be multiples of the size of a number.
absl::Status CheckRowsOfRing(const ExactSlots& slots, const LatentPart& ring,
                             int64_t device_granule) {
  KVASIR_RETURN_IF_ERROR(
      CheckLatentPart(kKernels.op, ring, /*page_tokens=*/1, device_granule));
  if (slots.row_bytes < ring.tile_bytes) {
    return Refuse(kKernels.op, "row_bytes", ring.tile_bytes, slots.row_bytes);
  }
  const int64_t number_bytes = DTypeBytes(ring.dtype);
  const auto misplaced = [number_bytes](const std::string& what,
                                        int64_t bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(kKernels.op, ": exact rows must begin at multiples of ",
                     number_bytes, " bytes, but ", what, " is ", bytes));
  };
  if (slots.row_bytes % number_bytes != 0) {
    return misplaced("row_bytes", slots.row_bytes);
  }
  for (int64_t s = 0; s < slots.num_segments; ++s) {
    const ExactSegment& segment = slots.segments[s];
    const std::pair<const char*, int64_t> places[] = {
        {"arena_bytes", segment.arena_bytes},
        {"page_bytes", segment.page_bytes},
        {"offset_bytes", segment.offset_bytes}};
    for (const auto& [name, bytes] : places) {
      if (bytes % number_bytes == 0) continue;
      return misplaced(absl::StrCat(name, " of segment ", s), bytes);
    }
  }
  return absl::OkStatus();
}

// Checks the exact rows of a part. If keys (or values) have exact slots, each
// of their parts must have exact rows.
absl::Status CheckExact(const ExactSlots& slots, const LatentPart& part,
                        const ExactRows* exact, int64_t device_granule) {
  if (!slots.any()) return absl::OkStatus();
  if (exact == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        kKernels.op, ": keys or values have exact slots, so each of their ",
        "parts must have exact rows, but a part has none"));
  }
  for (const LatentPart* rows : {&exact->ring, &exact->fresh}) {
    if (rows->num_groups != part.num_groups) {
      return Invalid("groups of exact rows", part.num_groups, part.num_groups,
                     rows->num_groups);
    }
    for (int64_t g = 0; g < part.num_groups; ++g) {
      const int64_t width = part.groups[g].width;
      if (rows->groups[g].width != width) {
        return Invalid("width of exact rows", width, width,
                       rows->groups[g].width);
      }
      if (rows->groups[g].num_runs != 0) {
        return Invalid("runs of codes in exact rows", 0, 0,
                       rows->groups[g].num_runs);
      }
    }
    if (rows->static_scale != nullptr) {
      return absl::InvalidArgumentError(absl::StrCat(
          kKernels.op,
          ": exact rows have no codes, so they must not have static ranges"));
    }
    if (rows->dtype != exact->ring.dtype) {
      return absl::InvalidArgumentError(absl::StrCat(
          kKernels.op,
          ": exact rows of new tokens and those in the ring must "
          "have the same number type, but have ",
          DTypeName(rows->dtype), " and ", DTypeName(exact->ring.dtype)));
    }
  }
  KVASIR_RETURN_IF_ERROR(CheckRowsOfRing(slots, exact->ring, device_granule));
  // exact->fresh is one page with one tile. The tile has a slot for each token
  // of the caller's longest step.
  return CheckLatentPart(kKernels.op, exact->fresh, exact->fresh.tile_slots,
                         device_granule);
}

absl::Status CheckColumns(const char* what, int64_t column, int64_t width,
                          int64_t row_stride) {
  if (column < 0) {
    return Refuse(kKernels.op, "first column of a head in q or out", 0, column);
  }
  if (column + width > row_stride) {
    return Refuse(kKernels.op, what, column + width, row_stride);
  }
  return absl::OkStatus();
}

absl::Status CheckKeys(const PagedAttentionParams& params,
                       const AttentionKeyPart& part, int64_t device_granule) {
  KVASIR_RETURN_IF_ERROR(
      CheckLatents(params, part.latents, part.group_of_head, device_granule));
  KVASIR_RETURN_IF_ERROR(
      CheckExact(params.key_exact, part.latents, part.exact, device_granule));
  if (part.rebuild != nullptr) {
    KVASIR_RETURN_IF_ERROR(CheckRebuild(*part.rebuild, part.latents));
  }
  const int64_t heads_per_kv = params.num_heads / params.num_kv_heads;
  for (int64_t h = 0; h < params.num_heads; ++h) {
    const int32_t group = part.group_of_head[h / heads_per_kv];
    const int64_t width = part.rebuild != nullptr
                              ? part.rebuild->dims
                              : part.latents.groups[group].width;
    KVASIR_RETURN_IF_ERROR(CheckColumns("q_row_stride", part.query_column[h],
                                        width, params.q_row_stride));
  }
  return absl::OkStatus();
}

absl::Status CheckKeyBias(const PagedAttentionParams& params) {
  const AttentionKeyBias& bias = *params.key_bias;
  if (bias.tile_pairs < 0 || bias.tile_pairs > kAttentionMaxHeadDim / 2) {
    return Invalid("tile_pairs of the key bias", 0, kAttentionMaxHeadDim / 2,
                   bias.tile_pairs);
  }
  if (bias.exact_pairs < 0 || bias.exact_pairs > kMostExactPairs) {
    return Invalid("exact_pairs of the key bias", 0, kMostExactPairs,
                   bias.exact_pairs);
  }
  const int32_t* const group_of_head = params.keys[0].group_of_head;
  for (int64_t j = 1; j < params.num_kv_heads; ++j) {
    if (std::find(group_of_head, group_of_head + j, group_of_head[j]) ==
        group_of_head + j) {
      continue;
    }
    return absl::InvalidArgumentError(
        absl::StrCat(kKernels.op,
                     ": a key bias needs a group of keys for each KV head, but "
                     "KV head ",
                     j, " shares group ", group_of_head[j]));
  }
  for (int64_t h = 0; h < params.num_heads; ++h) {
    KVASIR_RETURN_IF_ERROR(
        CheckColumns("q_row_stride", bias.query_column[h],
                     KeyBiasColumns(bias.tile_pairs, bias.exact_pairs),
                     params.q_row_stride));
  }
  return absl::OkStatus();
}

absl::Status CheckValues(const PagedAttentionParams& params,
                         const AttentionValuePart& part,
                         int64_t device_granule) {
  KVASIR_RETURN_IF_ERROR(
      CheckLatents(params, part.latents, part.group_of_head, device_granule));
  KVASIR_RETURN_IF_ERROR(
      CheckExact(params.value_exact, part.latents, part.exact, device_granule));
  if (part.lift != nullptr) KVASIR_RETURN_IF_ERROR(CheckLift(*part.lift));
  const int64_t heads_per_kv = params.num_heads / params.num_kv_heads;
  for (int64_t h = 0; h < params.num_heads; ++h) {
    const int32_t group = part.group_of_head[h / heads_per_kv];
    KVASIR_RETURN_IF_ERROR(CheckColumns("out_row_stride", part.out_column[h],
                                        OutWidth(part, group),
                                        params.out_row_stride));
  }
  return absl::OkStatus();
}

absl::Status CheckMass(const PagedAttentionParams& params) {
  const AttentionMass& mass = params.mass;
  if (mass.most_rows < 0) {
    return Refuse(kKernels.op, "mass.most_rows", 0, mass.most_rows);
  }
  if (mass.most_weights < 0) {
    return Refuse(kKernels.op, "mass.most_weights", 0, mass.most_weights);
  }
  const int64_t num_units = params.metadata.num_units;
  if (num_units == 0) {
    return mass.most_rows > 0 || mass.stored_positions
               ? Refuse(kKernels.op,
                        "units of slot metadata for attention mass", 1, 0)
               : absl::OkStatus();
  }
  KVASIR_RETURN_IF_ERROR(
      CheckSlotMetadata(kKernels.op, params.metadata, params.page_tokens));
  for (int64_t j = 0; j < params.num_kv_heads; ++j) {
    const int64_t unit =
        params.unit_of_head == nullptr ? -1 : params.unit_of_head[j];
    if (unit < 0 || unit >= num_units) {
      return Invalid("unit_of_head of a KV head", 0, num_units - 1, unit);
    }
  }
  return absl::OkStatus();
}

absl::Status Check(const PagedAttentionParams& params, int64_t device_granule) {
  if (params.num_kv_heads < 1 || params.num_heads < params.num_kv_heads ||
      params.num_heads % params.num_kv_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "paged_attention: the number of query heads, ", params.num_heads,
        ", must be a multiple of the number of KV heads, ", params.num_kv_heads,
        ", and both must be at least 1"));
  }
  if (params.page_tokens < 1) {
    return Refuse(kKernels.op, "page_tokens", 1, params.page_tokens);
  }
  if (params.window < 0) return Refuse(kKernels.op, "window", 0, params.window);
  if (params.most_partials < 0) {
    return Refuse(kKernels.op, "most_partials", 0, params.most_partials);
  }
  if (params.num_key_parts < 1) {
    return Refuse(kKernels.op, "key parts", 1, params.num_key_parts);
  }
  if (params.num_value_parts < 1) {
    return Refuse(kKernels.op, "value parts", 1, params.num_value_parts);
  }
  KVASIR_RETURN_IF_ERROR(CheckMass(params));
  KVASIR_RETURN_IF_ERROR(CheckExactSlots(params.key_exact));
  KVASIR_RETURN_IF_ERROR(CheckExactSlots(params.value_exact));
  for (int64_t p = 0; p < params.num_key_parts; ++p) {
    KVASIR_RETURN_IF_ERROR(CheckKeys(params, params.keys[p], device_granule));
  }
  for (int64_t p = 0; p < params.num_value_parts; ++p) {
    KVASIR_RETURN_IF_ERROR(
        CheckValues(params, params.values[p], device_granule));
  }
  if (params.key_bias != nullptr) {
    KVASIR_RETURN_IF_ERROR(CheckKeyBias(params));
  }
  return absl::OkStatus();
}

}  // namespace

// The key and value parts, in the form that launches read.
struct PreparedAttention::Parts {
  // Used only on a GPU.
  std::optional<DeviceTables> tables;
  AttentionDevice device;
  AttentionKernels kernels;

  std::vector<AttentionKeyPartArgs> keys;
  std::vector<AttentionValuePartArgs> values;
  // The objects that keys and values point to. They are in deques, which do not
  // move their elements.
  std::deque<KeyRebuildArgs> rebuilds;
  std::deque<ValueLiftArgs> lifts;
  std::deque<ExactRowsArgs> exact;
  std::deque<std::vector<const float*>> up;

  const float* const* Up(const DevicePtr<const float>* from, int64_t count) {
    if (from == nullptr) return nullptr;
    std::vector<const float*>& list = up.emplace_back();
    for (int64_t j = 0; j < count; ++j) {
      list.push_back(from[j].device_address());
    }
    return list.data();
  }
  const ExactRowsArgs* Exact(const ExactRows* from) {
    return from == nullptr ? nullptr : &exact.emplace_back(ForLaunch(*from));
  }
  const KeyRebuildArgs* Rebuild(const KeyRebuild* from, int64_t num_heads) {
    if (from == nullptr) return nullptr;
    KeyRebuildArgs& rebuild = rebuilds.emplace_back(ForLaunch(*from));
    rebuild.up = Up(from->up, num_heads);
    return &rebuild;
  }
  const ValueLiftArgs* Lift(const ValueLift* from, int64_t num_heads) {
    if (from == nullptr) return nullptr;
    ValueLiftArgs& lift = lifts.emplace_back(ForLaunch(*from));
    lift.up = Up(from->up, num_heads);
    return &lift;
  }

  PagedAttentionArgs Of(const PagedAttentionParams& shape) {
    for (int64_t p = 0; p < shape.num_key_parts; ++p) {
      const AttentionKeyPart& from = shape.keys[p];
      keys.push_back(
          {ForLaunch(from.latents), from.group_of_head, from.query_column,
           Rebuild(from.rebuild, shape.num_kv_heads), Exact(from.exact)});
    }
    for (int64_t p = 0; p < shape.num_value_parts; ++p) {
      const AttentionValuePart& from = shape.values[p];
      values.push_back({ForLaunch(from.latents), from.group_of_head,
                        from.out_column, Exact(from.exact),
                        Lift(from.lift, shape.num_kv_heads)});
    }
    PagedAttentionArgs args = ForLaunch(shape);
    args.keys = keys.data();
    args.values = values.data();
    return args;
  }

  // Calls visit for every pointer to device memory in the parts.
  // AttentionLaunch has the pointers that change with every step.
  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    const auto latents = [&](const LatentPartArgs& part) {
      visit(part.arena);
      visit(part.static_scale);
      visit(part.static_minimum);
    };
    for (const AttentionKeyPartArgs& part : keys) latents(part.latents);
    for (const AttentionValuePartArgs& part : values) latents(part.latents);
    for (const KeyRebuildArgs& rebuild : rebuilds) visit(rebuild.bias);
    for (const std::vector<const float*>& list : up) {
      for (const float* matrix : list) visit(matrix);
    }
    for (const ExactRowsArgs& rows : exact) {
      latents(rows.ring);
      latents(rows.fresh);
    }
  }
};

PreparedAttention::PreparedAttention() : parts_(std::make_unique<Parts>()) {}
PreparedAttention::PreparedAttention(PreparedAttention&&) noexcept = default;
PreparedAttention& PreparedAttention::operator=(PreparedAttention&&) noexcept =
    default;
PreparedAttention::~PreparedAttention() = default;

const AttentionKernels& PreparedAttention::kernels() const {
  return parts_->kernels;
}

double PreparedAttention::WorkOnSlots(
    const AttentionSequence& sequence,
    absl::Span<const double> head_work) const {
  return WorkOnTiles(*one_thread_, sequence, head_work.data());
}

bool Fits(const PagedAttentionParams& shape) {
  PreparedAttention::Parts parts;
  return AttentionGrid(parts.Of(shape), 1).fits();
}

absl::StatusOr<PreparedAttention> Prepare(Device& device,
                                          const PagedAttentionParams& shape) {
  KVASIR_RETURN_IF_ERROR(
      CheckActivations(kKernels.op, device.kind(), shape.dtype));
  KVASIR_RETURN_IF_ERROR(Check(shape, device.page_granule_bytes()));
  PreparedAttention prepared;
  const PagedAttentionArgs args = prepared.parts_->Of(shape);
  if (device.kind() == DeviceKind::kCuda) {
    KVASIR_RETURN_IF_ERROR(CheckDeviceServes(args));
  }
  prepared.parts_->ForPointers([&](const void* pointer) {
    device.CheckMemory(kKernels.op, DevicePtr<const void>(pointer));
  });
  device.CheckMemory(kKernels.op, shape.metadata.arena);
  prepared.grid_ = std::make_unique<AttentionGrid>(args, device.num_threads());
  if (!prepared.grid_->fits()) {
    return absl::InvalidArgumentError(absl::StrCat(
        kKernels.op,
        ": the key and value parts are too wide: attention of one query row "
        "needs more than ",
        kAttentionScratchBytes, " bytes of scratch memory"));
  }
  prepared.one_thread_ = std::make_unique<AttentionGrid>(args, 1);
  if (device.kind() == DeviceKind::kCuda) {
    PreparedAttention::Parts& parts = *prepared.parts_;
    KVASIR_ASSIGN_OR_RETURN(
        parts.device,
        MakeAttentionDevice(args, device, &parts.tables.emplace(&device),
                            &parts.kernels));
  }
  return prepared;
}

void PlaceWeights(int64_t num_heads, int64_t most_weights, int64_t page_tokens,
                  absl::Span<AttentionSequence> sequences) {
  int64_t next = 0;
  for (AttentionSequence& sequence : sequences) {
    sequence.weights_at = 0;
    const bool keeps = KeepsWeights(sequence);
    sequence.weights_at = -1;
    if (!keeps) continue;
    // Counts all live slots, not only those in the window, because layers may
    // have different windows.
    const int64_t floats = BlocksOf({sequence.first_live_index * page_tokens,
                                     sequence.first_slot + 1}) *
                           KeptBlockFloats(num_heads);
    if (floats > most_weights - next) continue;
    sequence.weights_at = next;
    next += floats;
  }
}

absl::StatusOr<AttentionStep> DivideStep(
    const PreparedAttention& prepared,
    absl::Span<const AttentionSequence> sequences) {
  for (size_t i = 0; i < sequences.size(); ++i) {
    const AttentionSequence& sequence = sequences[i];
    const std::pair<const char*, int64_t> counts[] = {
        {"first_row", sequence.first_row},
        {"num_rows", sequence.num_rows},
        {"first_slot", sequence.first_slot},
        {"first_live_index", sequence.first_live_index},
        {"evicted", sequence.evicted},
        {"first_counted_row", sequence.first_counted_row}};
    for (const auto& [name, count] : counts) {
      if (count >= 0) continue;
      return absl::InvalidArgumentError(
          absl::StrCat(kKernels.op, ": sequence ", i, ": ", name,
                       ": must be at least 0, but is ", count));
    }
    constexpr int64_t kMost = kAttentionMostSlots;
    if (sequence.evicted <= kMost - sequence.first_slot &&
        sequence.num_rows <= kMost - sequence.first_slot - sequence.evicted) {
      continue;
    }
    return absl::InvalidArgumentError(absl::StrCat(
        kKernels.op, ": sequence ", i, " has ", sequence.first_slot,
        " earlier, ", sequence.num_rows, " new and ", sequence.evicted,
        " evicted slots; at most ", kMost, " are allowed together"));
  }
  const AttentionGrid& grid = prepared.grid();
  const auto count = static_cast<int64_t>(sequences.size());
  AttentionStep step;
  step.work = grid.WorkOn(sequences.data(), count);
  step.takes_splits = TakesSplits(grid, {sequences.data(), count, step.work});
  const PagedAttentionArgs& params = grid.params();
  for (const AttentionSequence& sequence : sequences) {
    step.rows = std::max(step.rows, sequence.first_row + sequence.num_rows);
    if (sequence.num_rows > kDeviceSplitRows) step.has_prompts = true;
    if (!KeepsWeights(sequence)) continue;
    step.weights =
        std::max(step.weights, sequence.weights_at +
                                   BlocksOf(VisibleSlots(params, sequence, 0)) *
                                       KeptBlockFloats(params.num_heads));
  }
  return step;
}

absl::Status PagedAttention(Stream& stream, PreparedAttention& prepared,
                            const AttentionRows& rows,
                            const AttentionStep& step, Workspace& workspace) {
  if (rows.num_sequences < 0) {
    return Refuse(kKernels.op, "sequences", 0, rows.num_sequences);
  }
  AttentionGrid& grid = *prepared.grid_;
  Workspace::Scope scope(&workspace);
  const AttentionDevice& device = prepared.parts_->device;
  const bool on_gpu = prepared.parts_->tables.has_value();
  const DevicePtr<float> scratch = workspace.Take<float>(
      on_gpu ? DeviceScratchFloats(device, rows.num_sequences)
             : grid.scratch().floats * grid.threads());
  // On a GPU, the scratch has the memory for attention mass.
  const DevicePtr<float> mass =
      workspace.Take<float>(on_gpu ? 0 : grid.mass().floats);
  if (workspace.counting()) return CheckServed(kKernels, stream);
  if (!workspace.status().ok()) return workspace.status();
  if (grid.mass().any()) {
    const AttentionMass& most = grid.params().mass;
    if (step.rows > most.most_rows) {
      return Invalid("rows of a step that adds attention mass", 0,
                     most.most_rows, step.rows);
    }
    if (step.weights > most.most_weights) {
      return Invalid("floats of kept attention weights", 0, most.most_weights,
                     step.weights);
    }
  }
  grid.Bind({rows.q.device_address(),
             rows.out.device_address(),
             {rows.sequences.device_address(), rows.num_sequences, step.work},
             mass.device_address()});
  const AttentionLaunch launch = {
      &grid,  &device,  step.takes_splits, step.has_prompts,
      rows.q, rows.out, rows.sequences,    rows.num_sequences};
  return Launch(kKernels, stream, launch, scratch);
}

}  // namespace kvasir::kernels
