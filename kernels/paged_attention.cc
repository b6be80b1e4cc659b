#include "kernels/paged_attention.h"

#include "base/status_macros.h"
#include "kernels/dispatch.h"
#include "kernels/ops.h"

namespace kvasir::kernels {
namespace {

constexpr OpKernels<const PagedAttentionParams&, float*> kKernels = {
    "paged_attention", &PagedAttentionReference, &PagedAttentionSimd};

absl::Status CheckSide(const KvSideView& view) {
  if (view.width < 1 || view.width > kAttentionMaxWidth) {
    return absl::InvalidArgumentError(
        absl::StrCat("paged_attention: width: want 1 to ", kAttentionMaxWidth,
                     ", have ", view.width));
  }
  if (view.num_groups < 1) {
    return Refuse(kKernels.op, "groups", 1, view.num_groups);
  }
  return absl::OkStatus();
}

absl::Status Check(const PagedAttentionParams& params) {
  if (params.num_kv_heads < 1 || params.num_heads < params.num_kv_heads ||
      params.num_heads % params.num_kv_heads != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("paged_attention: ", params.num_heads,
                     " query heads over ", params.num_kv_heads, " KV heads"));
  }
  if (params.page_tokens < 1) {
    return Refuse(kKernels.op, "page_tokens", 1, params.page_tokens);
  }
  if (params.num_sequences < 0) {
    return Refuse(kKernels.op, "sequences", 0, params.num_sequences);
  }
  if (params.window < 0) return Refuse(kKernels.op, "window", 0, params.window);
  KVASIR_RETURN_IF_ERROR(CheckSide(params.key));
  KVASIR_RETURN_IF_ERROR(CheckSide(params.value));
  const int64_t q_row = params.num_heads * params.key.width;
  if (params.q_row_stride < q_row) {
    return Refuse(kKernels.op, "q_row_stride", q_row, params.q_row_stride);
  }
  const int64_t out_row = params.num_heads * params.value.width;
  if (params.out_row_stride < out_row) {
    return Refuse(kKernels.op, "out_row_stride", out_row,
                  params.out_row_stride);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status PagedAttention(Stream& stream, const PagedAttentionParams& params,
                            Workspace& workspace) {
  KVASIR_RETURN_IF_ERROR(Check(params));
  Workspace::Scope scope(&workspace);
  float* scratch = workspace.Take<float>(
      PagedAttentionScratch(params, ScratchThreads(stream)));
  if (workspace.counting()) return absl::OkStatus();
  if (!workspace.status().ok()) return workspace.status();
  return Launch(kKernels, stream, params, scratch);
}

}  // namespace kvasir::kernels
