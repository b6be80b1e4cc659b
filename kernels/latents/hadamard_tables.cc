#include "kernels/latents/hadamard_tables.h"

#include <algorithm>
#include <vector>

#include "base/hadamard.h"
#include "base/status_macros.h"
#include "kernels/simd/scalar_math.h"

namespace kvasir::kernels {

absl::StatusOr<HadamardBlock> HadamardTables::BlockOf(int64_t order) {
  HadamardBlock block;
  block.order = order;
  const base::HadamardKernel signs = base::HadamardKernelOf(order);
  block.kernel_order = signs.order;
  if (signs.order == 1) return block;
  auto found = kernels_.find(signs.order);
  if (found == kernels_.end()) {
    Kernel kernel;
    kernel.stride = (signs.order + kLanes - 1) / kLanes * kLanes;
    const auto size = static_cast<size_t>(signs.order * kernel.stride);
    std::vector<float> columns(size, 0.0f);
    std::vector<float> rows(size, 0.0f);
    for (int64_t a = 0; a < signs.order; ++a) {
      for (int64_t b = 0; b < signs.order; ++b) {
        const auto sign = static_cast<float>(
            signs.signs[static_cast<size_t>(a * signs.order + b)]);
        rows[static_cast<size_t>(a * kernel.stride + b)] = sign;
        columns[static_cast<size_t>(b * kernel.stride + a)] = sign;
      }
    }
    KVASIR_ASSIGN_OR_RETURN(kernel.columns, tables_.Add<float>(columns));
    KVASIR_ASSIGN_OR_RETURN(kernel.rows, tables_.Add<float>(rows));
    found = kernels_.emplace(signs.order, kernel).first;
  }
  block.columns = found->second.columns.device_address();
  block.rows = found->second.rows.device_address();
  block.stride = found->second.stride;
  return block;
}

absl::StatusOr<const HadamardTables::Blocks*> HadamardTables::BlocksFor(
    int64_t width) {
  const auto found = blocks_.find(width);
  if (found != blocks_.end()) return &found->second;
  Blocks out;
  std::vector<HadamardBlock> blocks;
  for (const int64_t order : base::HadamardBlocks(width)) {
    KVASIR_ASSIGN_OR_RETURN(blocks.emplace_back(), BlockOf(order));
    const HadamardBlock& block = blocks.back();
    const int64_t lines = block.order / block.kernel_order;
    out.scratch_floats = std::max(
        out.scratch_floats, 2 * std::max(block.order, lines * block.stride));
  }
  out.count = static_cast<int64_t>(blocks.size());
  KVASIR_ASSIGN_OR_RETURN(out.device, tables_.Add<HadamardBlock>(blocks));
  return &blocks_.emplace(width, out).first->second;
}

}  // namespace kvasir::kernels
