#include <cmath>

#include "kernels/device/stream.h"
#include "kernels/linear/matmul.h"

namespace kvasir::kernels {
namespace {

template <typename T>
float Element(const MatmulArgs& params, int64_t row, int64_t column) {
  const float* x = params.x + row * params.x_row_stride;
  const int64_t k_end = params.weight.k;
  const T* w = static_cast<const T*>(params.weight.data) +
               column / kPanelColumns * k_end * kPanelColumns +
               column % kPanelColumns;
  float sum = 0.0f;
  for (int64_t k = 0; k < k_end; ++k) {
    sum = std::fma(x[k], ToFloat(w[k * kPanelColumns]), sum);
  }
  return sum;
}

}  // namespace

void MatmulReference(const MatmulArgs& params, float*, CpuStream& stream) {
  VisitDType(params.weight.dtype, [&](auto type) {
    for (int64_t t = 0; t < params.num_rows; ++t) {
      for (int64_t n = 0; n < params.weight.n; ++n) {
        float sum = Element<decltype(type)>(params, t, n);
        if (params.bias != nullptr) sum = sum + params.bias[n];
        params.y[t * params.y_row_stride + n] = sum;
      }
    }
  });
  stream.AddWeightBytesRead(params.num_rows * params.weight.bytes());
}

}  // namespace kvasir::kernels
