#include "kernels/kv_append.h"

#include "base/status_macros.h"
#include "kernels/dispatch.h"
#include "kernels/ops.h"

namespace kvasir::kernels {
namespace {

constexpr OpKernels<const KvAppendParams&> kKernels = {
    "kv_append", &KvAppendReference, &KvAppendSimd};

// The runs of a group follow each other from channel 0 to the last one.
absl::Status CheckRuns(const LatentGroup& group) {
  int64_t end = 0;
  for (int64_t r = 0; r < group.num_runs; ++r) {
    const CodeRun& run = group.runs[r];
    if (run.bits != 1 && run.bits != 2 && run.bits != 3 && run.bits != 4 &&
        run.bits != 8) {
      return absl::InvalidArgumentError(
          absl::StrCat("kv_append: run ", r,
                       ": want 1, 2, 3, 4 or 8 bits, have ", run.bits));
    }
    if (run.begin != end || run.width < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("kv_append: run ", r, ": want channels from ", end,
                       " on, have ", run.width, " from ", run.begin));
    }
    end += run.width;
  }
  if (group.num_runs > 0 && end != group.width) {
    return absl::InvalidArgumentError(absl::StrCat(
        "kv_append: runs of ", end, " channels in a latent of ", group.width));
  }
  return absl::OkStatus();
}

absl::Status CheckPart(const KvAppendPart& side) {
  const LatentPart& part = side.part;
  if (part.num_groups < 1) {
    return Refuse(kKernels.op, "groups", 1, part.num_groups);
  }
  for (int64_t g = 0; g < part.num_groups; ++g) {
    const LatentGroup& group = part.groups[g];
    if (group.width < 1) return Refuse(kKernels.op, "width", 1, group.width);
    if (group.column < 0) return Refuse(kKernels.op, "column", 0, group.column);
    if (side.row_stride < group.column + group.width) {
      return Refuse(kKernels.op, "row_stride", group.column + group.width,
                    side.row_stride);
    }
    KVASIR_RETURN_IF_ERROR(CheckRuns(group));
    const int64_t codes_bytes = CodesBytes(part, group);
    if (group.codes_stride_bytes < codes_bytes) {
      return Refuse(kKernels.op, "codes_stride_bytes", codes_bytes,
                    group.codes_stride_bytes);
    }
    const int64_t params_bytes = ParamsBytes(part, group);
    if (group.params_stride_bytes < params_bytes) {
      return Refuse(kKernels.op, "params_stride_bytes", params_bytes,
                    group.params_stride_bytes);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status KvAppend(Stream& stream, const KvAppendParams& params,
                      Workspace& workspace) {
  if (params.num_tokens < 0) {
    return Refuse(kKernels.op, "tokens", 0, params.num_tokens);
  }
  if (params.page_tokens < 1) {
    return Refuse(kKernels.op, "page_tokens", 1, params.page_tokens);
  }
  for (int64_t p = 0; p < params.num_parts; ++p) {
    KVASIR_RETURN_IF_ERROR(CheckPart(params.parts[p]));
  }
  if (workspace.counting()) return absl::OkStatus();
  return Launch(kKernels, stream, params);
}

}  // namespace kvasir::kernels
