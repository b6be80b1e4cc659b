#include "kernels/latents/kv_append.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/status_macros.h"
#include "kernels/device/dispatch.h"
#include "kernels/latents/latent_check.h"
#include "kernels/latents/latent_tables.h"
#include "kernels/latents/ops.h"

namespace kvasir::kernels {
namespace {

constexpr OpKernels<KvAppendParams, DevicePtr<float>> kKernels = {
    "kv_append", &KvAppendReference, &KvAppendSimd};

absl::Status CheckPart(const KvAppendPart& side, const KvAppendShape& shape,
                       int64_t device_granule) {
  KVASIR_RETURN_IF_ERROR(CheckLatentPart(kKernels.op, side.part,
                                         shape.page_tokens, device_granule));
  if (side.column < 0) return Refuse(kKernels.op, "column", 0, side.column);
  for (int64_t g = 0; g < side.part.num_groups; ++g) {
    const LatentGroup& group = side.part.groups[g];
    const int64_t end = side.column + group.column + group.width;
    if (shape.row_stride < end) {
      return Refuse(kKernels.op, "row_stride", end, shape.row_stride);
    }
    if (side.unit_of_group == nullptr) continue;
    const int64_t unit = side.unit_of_group[g];
    if (unit < 0 || unit >= shape.metadata.num_units) {
      return absl::InvalidArgumentError(
          absl::StrCat(kKernels.op, ": group ", g, " belongs to eviction unit ",
                       unit, ", but the units are numbered from 0 to ",
                       shape.metadata.num_units - 1));
    }
  }
  return absl::OkStatus();
}

void Count(const LatentPart& part, KvAppendParams* params) {
  params->num_groups += part.num_groups;
  params->most_groups = std::max(params->most_groups, part.num_groups);
  for (int64_t g = 0; g < part.num_groups; ++g) {
    if (part.groups[g].num_runs == 0) continue;
    params->most_codes = std::max(params->most_codes, part.groups[g].width);
  }
}

absl::Status CheckWidest(const Device& device, int64_t most_codes) {
  if (device.kind() == DeviceKind::kCpu || most_codes <= kCudaAppendCodes) {
    return absl::OkStatus();
  }
  return absl::UnimplementedError(
      absl::StrCat(kKernels.op, ": a latent with ", most_codes,
                   " channels stored as codes is too wide for the GPU kernel, "
                   "which supports at most ",
                   kCudaAppendCodes));
}

// The number of floats of scratch memory that the op needs. They hold sums of
// squared errors of each token. A CPU has one sum for each eviction unit and
// side (keys or values), a GPU one for each latent.
int64_t ScratchOf(const Stream& stream, const KvAppendParams& params,
                  int64_t num_tokens) {
  const int64_t num_units = params.metadata.num_units;
  if (stream.device() == DeviceKind::kCpu) {
    return num_tokens * num_units * kErrorSides;
  }
  return num_units > 0 ? num_tokens * params.num_groups : 0;
}

absl::Status AddUnitLatents(absl::Span<const KvAppendPart> parts,
                            PreparedKvAppend* prepared) {
  std::vector<std::vector<UnitLatent>> of_unit(
      static_cast<size_t>(prepared->params.metadata.num_units));
  int32_t index = 0;
  for (const KvAppendPart& side : parts) {
    uint32_t sides = 0;
    for (int s = 0; s < kErrorSides; ++s) {
      if (side.errors_of[s]) sides |= 1u << s;
    }
    for (int64_t g = 0; g < side.part.num_groups; ++g, ++index) {
      if (side.unit_of_group == nullptr || side.part.groups[g].num_runs == 0) {
        continue;
      }
      of_unit[static_cast<size_t>(side.unit_of_group[g])].push_back(
          {index, sides});
    }
  }
  std::vector<UnitLatent> latents;
  std::vector<int32_t> ends;
  for (const std::vector<UnitLatent>& unit : of_unit) {
    latents.insert(latents.end(), unit.begin(), unit.end());
    ends.push_back(static_cast<int32_t>(latents.size()));
  }
  KVASIR_ASSIGN_OR_RETURN(prepared->params.unit_latents,
                          prepared->tables.Add<UnitLatent>(latents));
  KVASIR_ASSIGN_OR_RETURN(prepared->params.unit_ends,
                          prepared->tables.Add<int32_t>(ends));
  return absl::OkStatus();
}

// Copies the tables of a part to the device, and returns the part with their
// device addresses.
absl::StatusOr<KvAppendPart> Moved(KvAppendPart side, DeviceTables* tables) {
  KVASIR_ASSIGN_OR_RETURN(side.part, AddLatentTables(side.part, tables));
  if (side.unit_of_group == nullptr) return side;
  KVASIR_ASSIGN_OR_RETURN(
      const DevicePtr<const int32_t> units,
      tables->Add<int32_t>(absl::MakeConstSpan(
          side.unit_of_group, static_cast<size_t>(side.part.num_groups))));
  side.unit_of_group = units.device_address();
  return side;
}

}  // namespace

void StartSlotMetadata(const KvAppendArgs& params, int64_t token,
                       float* scratch) {
  std::fill_n(SquaredErrorsOf(params, token, 0, scratch),
              params.metadata.num_units * kErrorSides, 0.0f);
}

void WriteSlotMetadata(const KvAppendArgs& params, int64_t token,
                       float* scratch) {
  const int64_t to = SlotOfToken(params, token);
  if (to < 0) return;
  const SlotMetadataArgs& metadata = params.metadata;
  const int64_t page = to / params.page_tokens;
  const int64_t slot = to % params.page_tokens;
  for (int64_t unit = 0; unit < metadata.num_units; ++unit) {
    ScoresOf(metadata, page, unit)[slot] = 0.0f;
    PositionsOf(metadata, page, unit)[slot] =
        static_cast<uint32_t>(params.positions[token]);
    const float* squares = SquaredErrorsOf(params, token, unit, scratch);
    for (int side = 0; side < kErrorSides; ++side) {
      uint8_t* const errors = ErrorsOf(metadata, side, page, unit);
      if (errors != nullptr)
        errors[slot] = EncodeError(std::sqrt(squares[side]));
    }
  }
}

absl::StatusOr<PreparedKvAppend> Prepare(Device& device,
                                         const KvAppendShape& shape,
                                         absl::Span<const KvAppendPart> parts) {
  KVASIR_RETURN_IF_ERROR(
      CheckActivations(kKernels.op, device.kind(), shape.dtype));
  if (shape.page_tokens < 1) {
    return Refuse(kKernels.op, "page_tokens", 1, shape.page_tokens);
  }
  if (shape.slots_are_bytes && shape.page_tokens != 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        kKernels.op,
        ": page_tokens must be 1 if slots are given as byte offsets, but is ",
        shape.page_tokens));
  }
  if (shape.slots_are_bytes && shape.metadata.num_units > 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(kKernels.op,
                     ": slots given as byte offsets cannot have slot metadata, "
                     "but have it for ",
                     shape.metadata.num_units, " eviction units"));
  }
  if (shape.metadata.num_units > 0) {
    KVASIR_RETURN_IF_ERROR(
        CheckSlotMetadata(kKernels.op, shape.metadata, shape.page_tokens));
    device.CheckMemory(kKernels.op, shape.metadata.arena);
  }
  PreparedKvAppend prepared(&device);
  std::vector<KvAppendPart> moved;
  for (const KvAppendPart& part : parts) {
    KVASIR_RETURN_IF_ERROR(CheckPart(part, shape, device.page_granule_bytes()));
    for (const DevicePtr<const void> memory :
         {DevicePtr<const void>(part.part.arena),
          DevicePtr<const void>(part.part.static_scale),
          DevicePtr<const void>(part.part.static_minimum),
          DevicePtr<const void>(part.clamped)}) {
      device.CheckMemory(kKernels.op, memory);
    }
    Count(part.part, &prepared.params);
    KVASIR_ASSIGN_OR_RETURN(moved.emplace_back(),
                            Moved(part, &prepared.tables));
    if (shape.slots_are_bytes) moved.back().part.page_bytes = 1;
  }
  KVASIR_RETURN_IF_ERROR(CheckWidest(device, prepared.params.most_codes));
  prepared.params.num_parts = static_cast<int64_t>(parts.size());
  prepared.params.row_stride = shape.row_stride;
  prepared.params.page_tokens = shape.page_tokens;
  prepared.params.metadata = shape.metadata;
  prepared.params.dtype = shape.dtype;
  if (device.kind() != DeviceKind::kCpu && shape.metadata.num_units > 0) {
    KVASIR_RETURN_IF_ERROR(AddUnitLatents(parts, &prepared));
  }
  KVASIR_ASSIGN_OR_RETURN(prepared.params.parts,
                          prepared.tables.Add<KvAppendPart>(moved));
  return prepared;
}

absl::Status KvAppend(Stream& stream, const PreparedKvAppend& prepared,
                      const KvAppendRows& rows, Workspace& workspace) {
  if (rows.num_tokens < 0) {
    return Refuse(kKernels.op, "tokens", 0, rows.num_tokens);
  }
  const int64_t num_units = prepared.params.metadata.num_units;
  Workspace::Scope scope(&workspace);
  const DevicePtr<float> scratch = workspace.Take<float>(
      ScratchOf(stream, prepared.params, rows.num_tokens));
  if (workspace.counting()) return CheckServed(kKernels, stream);
  if (!workspace.status().ok()) return workspace.status();
  if (num_units > 0 && rows.num_tokens > 0 && !rows.positions) {
    return absl::InvalidArgumentError(
        absl::StrCat(kKernels.op,
                     ": slot metadata needs the positions of the tokens, which "
                     "are missing"));
  }
  KvAppendParams params = prepared.params;
  params.rows = rows.rows;
  params.slots = rows.slots;
  params.num_tokens = rows.num_tokens;
  params.not_finite = rows.not_finite;
  params.positions = rows.positions;
  return Launch(kKernels, stream, params, scratch);
}

}  // namespace kvasir::kernels
