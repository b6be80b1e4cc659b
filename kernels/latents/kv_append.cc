#include "kernels/latents/kv_append.h"

#include <vector>

#include "base/status_macros.h"
#include "kernels/device/dispatch.h"
#include "kernels/latents/latent_check.h"
#include "kernels/latents/ops.h"

namespace kvasir::kernels {
namespace {

constexpr OpKernels<KvAppendParams> kKernels = {"kv_append", &KvAppendReference,
                                                &KvAppendSimd};

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
  }
  return absl::OkStatus();
}

// The same part with its groups and their runs on the device.
absl::StatusOr<KvAppendPart> Moved(KvAppendPart side, DeviceTables* tables) {
  std::vector<LatentGroup> groups(side.part.groups,
                                  side.part.groups + side.part.num_groups);
  std::vector<CodeRun> runs;
  for (const LatentGroup& group : groups) {
    runs.insert(runs.end(), group.runs, group.runs + group.num_runs);
  }
  KVASIR_ASSIGN_OR_RETURN(DevicePtr<const CodeRun> next,
                          tables->Add<CodeRun>(runs));
  for (LatentGroup& group : groups) {
    group.runs = next.device_address();
    next = next + group.num_runs;
  }
  KVASIR_ASSIGN_OR_RETURN(const DevicePtr<const LatentGroup> moved,
                          tables->Add<LatentGroup>(groups));
  side.part.groups = moved.device_address();
  return side;
}

}  // namespace

absl::StatusOr<PreparedKvAppend> Prepare(Device& device,
                                         const KvAppendShape& shape,
                                         absl::Span<const KvAppendPart> parts) {
  KVASIR_RETURN_IF_ERROR(
      CheckActivations(kKernels.op, device.kind(), shape.dtype));
  if (shape.page_tokens < 1) {
    return Refuse(kKernels.op, "page_tokens", 1, shape.page_tokens);
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
    KVASIR_ASSIGN_OR_RETURN(moved.emplace_back(),
                            Moved(part, &prepared.tables));
  }
  prepared.params.num_parts = static_cast<int64_t>(parts.size());
  prepared.params.row_stride = shape.row_stride;
  prepared.params.page_tokens = shape.page_tokens;
  prepared.params.dtype = shape.dtype;
  KVASIR_ASSIGN_OR_RETURN(prepared.params.parts,
                          prepared.tables.Add<KvAppendPart>(moved));
  return prepared;
}

absl::Status KvAppend(Stream& stream, const PreparedKvAppend& prepared,
                      const KvAppendRows& rows, Workspace& workspace) {
  if (rows.num_tokens < 0) {
    return Refuse(kKernels.op, "tokens", 0, rows.num_tokens);
  }
  if (workspace.counting()) return absl::OkStatus();
  KvAppendParams params = prepared.params;
  params.rows = rows.rows;
  params.slots = rows.slots;
  params.num_tokens = rows.num_tokens;
  params.not_finite = rows.not_finite;
  return Launch(kKernels, stream, params);
}

}  // namespace kvasir::kernels
