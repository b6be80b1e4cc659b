#include "kernels/latents/lift.h"

#include "base/status_macros.h"
#include "kernels/device/dispatch.h"
#include "kernels/latents/ops.h"

namespace kvasir::kernels {
namespace {

constexpr OpKernels<const LiftParams&, float*> kLift = {"lift", &LiftReference,
                                                        &LiftSimd};
constexpr OpKernels<const ComplexLiftParams&> kComplexLift = {
    "complex_lift", &ComplexLiftReference, &ComplexLiftSimd};

// A head's numbers at columns[h] of rows `stride` apart.
absl::Status CheckColumns(const char* op, const char* what, int64_t begin,
                          int64_t width, int64_t stride) {
  if (begin < 0) return Refuse(op, "column", 0, begin);
  if (stride < begin + width) return Refuse(op, what, begin + width, stride);
  return absl::OkStatus();
}

absl::Status CheckHeads(const char* op, int64_t num_rows, int64_t num_heads,
                        int64_t num_kv_heads) {
  if (num_rows < 0) return Refuse(op, "rows", 0, num_rows);
  if (num_kv_heads < 1) return Refuse(op, "kv_heads", 1, num_kv_heads);
  if (num_heads < 1 || num_heads % num_kv_heads != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(op, ": ", num_heads, " query heads are no multiple of ",
                     num_kv_heads, " KV heads"));
  }
  return absl::OkStatus();
}

absl::Status CheckChannels(const ComplexLiftParams& params) {
  for (int64_t j = 0; j < params.num_kv_heads; ++j) {
    const ComplexChannels& channels = params.channels[j];
    if (channels.num_channels < 0) {
      return Refuse(kComplexLift.op, "channels", 0, channels.num_channels);
    }
    for (int64_t c = 0; c < channels.num_channels; ++c) {
      if (channels.pairs[c] >= 0 && channels.pairs[c] < params.num_pairs) {
        continue;
      }
      return absl::InvalidArgumentError(absl::StrCat(
          kComplexLift.op, ": KV head ", j, ": pair of channel ", c,
          ": want 0 to ", params.num_pairs - 1, ", have ", channels.pairs[c]));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Lift(Stream& stream, const LiftParams& params,
                  Workspace& workspace) {
  KVASIR_RETURN_IF_ERROR(CheckHeads(kLift.op, params.num_rows, params.num_heads,
                                    params.num_kv_heads));
  const int64_t queries = params.num_heads / params.num_kv_heads;
  for (int64_t h = 0; h < params.num_heads; ++h) {
    const PackedMatrix& matrix = params.matrices[h / queries];
    if (matrix.k < 1) return Refuse(kLift.op, "in", 1, matrix.k);
    if (matrix.n < 1) return Refuse(kLift.op, "out", 1, matrix.n);
    KVASIR_RETURN_IF_ERROR(CheckColumns(kLift.op, "x_row_stride",
                                        params.column_in[h], matrix.k,
                                        params.x_row_stride));
    KVASIR_RETURN_IF_ERROR(CheckColumns(kLift.op, "y_row_stride",
                                        params.column_out[h], matrix.n,
                                        params.y_row_stride));
  }
  Workspace::Scope scope(&workspace);
  float* scratch = workspace.Take<float>(LiftScratch(ScratchThreads(stream)));
  if (workspace.counting()) return absl::OkStatus();
  if (!workspace.status().ok()) return workspace.status();
  return Launch(kLift, stream, params, scratch);
}

absl::Status ComplexLift(Stream& stream, const ComplexLiftParams& params,
                         Workspace& workspace) {
  KVASIR_RETURN_IF_ERROR(CheckHeads(kComplexLift.op, params.num_rows,
                                    params.num_heads, params.num_kv_heads));
  if (params.num_pairs < 1) {
    return Refuse(kComplexLift.op, "pairs", 1, params.num_pairs);
  }
  KVASIR_RETURN_IF_ERROR(CheckChannels(params));
  const int64_t queries = params.num_heads / params.num_kv_heads;
  for (int64_t h = 0; h < params.num_heads; ++h) {
    const int64_t channels = params.channels[h / queries].num_channels;
    KVASIR_RETURN_IF_ERROR(
        CheckColumns(kComplexLift.op, "x_row_stride", params.column_in[h],
                     2 * params.num_pairs, params.x_row_stride));
    KVASIR_RETURN_IF_ERROR(CheckColumns(kComplexLift.op, "y_row_stride",
                                        params.column_out[h], 2 * channels,
                                        params.y_row_stride));
  }
  if (workspace.counting()) return absl::OkStatus();
  return Launch(kComplexLift, stream, params);
}

}  // namespace kvasir::kernels
