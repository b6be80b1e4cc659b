#include "kernels/latents/hadamard.h"

#include <algorithm>

#include "base/status_macros.h"
#include "kernels/device/dispatch.h"
#include "kernels/latents/ops.h"

namespace kvasir::kernels {
namespace {

constexpr OpKernels<const HadamardParams&, float*> kKernels = {
    "hadamard", &HadamardReference, &HadamardSimd};

absl::Status CheckLatent(const HadamardParams& params,
                         const HadamardLatent& latent) {
  int64_t width = 0;
  for (int64_t b = 0; b < latent.num_blocks; ++b) {
    const HadamardBlock& block = latent.blocks[b];
    const int64_t order =
        block.kernel_order < 1 ? 0 : block.order / block.kernel_order;
    if (order < 1 || (order & (order - 1)) != 0 ||
        order * block.kernel_order != block.order) {
      return absl::InvalidArgumentError(
          absl::StrCat("hadamard: a block of order ", block.order,
                       " is no power of two times ", block.kernel_order));
    }
    width += block.order;
  }
  if (latent.column < 0) return Refuse(kKernels.op, "column", 0, latent.column);
  const int64_t end = latent.column + width;
  if (params.x_row_stride < end) {
    return Refuse(kKernels.op, "x_row_stride", end, params.x_row_stride);
  }
  if (params.y_row_stride < end) {
    return Refuse(kKernels.op, "y_row_stride", end, params.y_row_stride);
  }
  return absl::OkStatus();
}

}  // namespace

int64_t HadamardScratch(const HadamardParams& params) {
  int64_t most = 0;
  for (int64_t l = 0; l < params.num_latents; ++l) {
    for (int64_t b = 0; b < params.latents[l].num_blocks; ++b) {
      const HadamardBlock& block = params.latents[l].blocks[b];
      const int64_t lines = block.order / block.kernel_order;
      most = std::max(most, 2 * std::max(block.order, lines * block.stride));
    }
  }
  return most;
}

absl::Status Hadamard(Stream& stream, const HadamardParams& params,
                      Workspace& workspace) {
  if (params.num_rows < 0) {
    return Refuse(kKernels.op, "rows", 0, params.num_rows);
  }
  for (int64_t l = 0; l < params.num_latents; ++l) {
    KVASIR_RETURN_IF_ERROR(CheckLatent(params, params.latents[l]));
  }
  Workspace::Scope scope(&workspace);
  float* scratch =
      workspace.Take<float>(HadamardScratch(params) * ScratchThreads(stream));
  if (workspace.counting()) return absl::OkStatus();
  if (!workspace.status().ok()) return workspace.status();
  return Launch(kKernels, stream, params, scratch);
}

}  // namespace kvasir::kernels
