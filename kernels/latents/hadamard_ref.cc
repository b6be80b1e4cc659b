#include <cmath>

#include "kernels/device/stream.h"
#include "kernels/latents/hadamard.h"

namespace kvasir::kernels {
namespace {

// Multiplies each row of z [k, m] by Sylvester's matrix of order m, in place.
void MultiplySylvester(int64_t k, int64_t m, float* z) {
  for (int64_t s = m / 2; s > 0; s /= 2) {
    for (int64_t i = 0; i < k * m; ++i) {
      if ((i % m & s) != 0) continue;
      const float first = z[i];
      const float second = z[i + s];
      z[i] = first + second;
      z[i + s] = first - second;
    }
  }
}

void MultiplyBlock(const HadamardBlock& block, bool transposed, const float* x,
                   float* z, float* y) {
  const int64_t k = block.kernel_order;
  const int64_t m = block.order / k;
  const float* signs = transposed ? block.rows : block.columns;
  const auto scale =
      static_cast<float>(1.0 / std::sqrt(static_cast<double>(block.order)));
  for (int64_t i = 0; i < block.order; ++i) z[i] = x[i];
  MultiplySylvester(k, m, z);
  for (int64_t a = 0; a < k; ++a) {
    for (int64_t p = 0; p < m; ++p) {
      float acc = k == 1 ? z[p] : 0.0f;
      for (int64_t b = 0; k > 1 && b < k; ++b) {
        acc = acc + signs[b * block.stride + a] * z[b * m + p];
      }
      y[a * m + p] = acc * scale;
    }
  }
}

}  // namespace

void HadamardReference(const HadamardArgs& params, float* scratch, CpuStream&) {
  for (int64_t t = 0; t < params.num_rows; ++t) {
    for (int64_t l = 0; l < params.num_latents; ++l) {
      int64_t column = params.latents[l].column;
      for (int64_t b = 0; b < params.latents[l].num_blocks; ++b) {
        const HadamardBlock& block = params.latents[l].blocks[b];
        MultiplyBlock(block, params.transposed,
                      params.x + t * params.x_row_stride + column, scratch,
                      params.y + t * params.y_row_stride + column);
        column += block.order;
      }
    }
  }
}

}  // namespace kvasir::kernels
