#include <algorithm>
#include <cmath>

#include "kernels/device/stream.h"
#include "kernels/linear/matmul.h"

namespace kvasir::kernels {
namespace {

struct PanelSums {
  float of_column[kPanelColumns] = {};
};

// Computes the sums of one row of x and one panel of W.
template <typename T>
__attribute__((always_inline)) inline PanelSums SumPanelAs(const float* x,
                                                           const T* w,
                                                           int64_t depth) {
  PanelSums sums;
  for (int64_t k = 0; k < depth; ++k) {
    for (int64_t n = 0; n < kPanelColumns; ++n) {
      sums.of_column[n] =
          std::fma(x[k], ToFloat(w[k * kPanelColumns + n]), sums.of_column[n]);
    }
  }
  return sums;
}

#if defined(__x86_64__)
template <typename T>
__attribute__((target("avx2,fma"))) PanelSums SumPanelByFma(const float* x,
                                                            const T* w,
                                                            int64_t depth) {
  return SumPanelAs(x, w, depth);
}
#endif

// In code that is compiled without FMA instructions, std::fma calls a slow
// function. Both versions give the same bits.
template <typename T>
PanelSums SumPanel(const float* x, const T* w, int64_t depth) {
#if defined(__x86_64__)
  static const bool has_fma =
      __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
  if (has_fma) return SumPanelByFma(x, w, depth);
#endif
  return SumPanelAs(x, w, depth);
}

}  // namespace

void MatmulReference(const MatmulArgs& params, float*, CpuStream& stream) {
  const PackedMatrixArgs& weight = params.weight;
  VisitDType(weight.dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t t = 0; t < params.num_rows; ++t) {
      const float* const x = params.x + t * params.x_row_stride;
      float* const y = params.y + t * params.y_row_stride;
      for (int64_t first = 0; first < weight.n; first += kPanelColumns) {
        const T* const w =
            static_cast<const T*>(weight.data) + first * weight.k;
        const PanelSums sums = SumPanel(x, w, weight.k);
        for (int64_t n = first; n < std::min(weight.n, first + kPanelColumns);
             ++n) {
          y[n] = params.bias == nullptr
                     ? sums.of_column[n - first]
                     : sums.of_column[n - first] + params.bias[n];
        }
      }
    }
  });
  stream.AddWeightBytesRead(params.num_rows * params.weight.bytes());
}

}  // namespace kvasir::kernels
