#include "kernels/latents/hadamard_tables.h"

#include "base/hadamard.h"
#include "kernels/simd/scalar_math.h"

namespace kvasir::kernels {

HadamardBlock HadamardTables::BlockOf(int64_t order) {
  HadamardBlock block;
  block.order = order;
  const base::HadamardKernel signs = base::HadamardKernelOf(order);
  block.kernel_order = signs.order;
  if (signs.order == 1) return block;
  const auto [entry, is_new] = kernels_.try_emplace(signs.order);
  Kernel& kernel = entry->second;
  if (is_new) {
    kernel.stride = (signs.order + kLanes - 1) / kLanes * kLanes;
    const auto size = static_cast<size_t>(signs.order * kernel.stride);
    kernel.columns.assign(size, 0.0f);
    kernel.rows.assign(size, 0.0f);
    for (int64_t a = 0; a < signs.order; ++a) {
      for (int64_t b = 0; b < signs.order; ++b) {
        const auto sign = static_cast<float>(
            signs.signs[static_cast<size_t>(a * signs.order + b)]);
        kernel.rows[static_cast<size_t>(a * kernel.stride + b)] = sign;
        kernel.columns[static_cast<size_t>(b * kernel.stride + a)] = sign;
      }
    }
  }
  block.columns = kernel.columns.data();
  block.rows = kernel.rows.data();
  block.stride = kernel.stride;
  return block;
}

HadamardLatent HadamardTables::Of(int64_t width, int64_t column) {
  const auto [entry, is_new] = blocks_.try_emplace(width);
  if (is_new) {
    for (const int64_t order : base::HadamardBlocks(width)) {
      entry->second.push_back(BlockOf(order));
    }
  }
  HadamardLatent latent;
  latent.column = column;
  latent.blocks = entry->second.data();
  latent.num_blocks = static_cast<int64_t>(entry->second.size());
  return latent;
}

}  // namespace kvasir::kernels
