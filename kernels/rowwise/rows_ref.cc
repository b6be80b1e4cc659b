#include <cstring>

#include "kernels/device/stream.h"
#include "kernels/rowwise/rows.h"

namespace kvasir::kernels {

void AddRowsReference(const AddRowsArgs& params, CpuStream&) {
  for (int64_t t = 0; t < params.num_rows; ++t) {
    float* y = params.y + t * params.y_row_stride;
    const float* x = params.x + t * params.x_row_stride;
    for (int64_t i = 0; i < params.columns; ++i) y[i] = y[i] + x[i];
  }
}

void SumRowsReference(const SumRowsArgs& params, CpuStream&) {
  for (int64_t i = 0; i < params.columns; ++i) {
    float sum = params.x[i];
    for (int64_t t = 1; t < params.num_rows; ++t) {
      sum = sum + params.x[t * params.x_row_stride + i];
    }
    params.out[i] = sum;
  }
}

void GatherRowsReference(const GatherRowsArgs& params, CpuStream&) {
  for (int64_t t = 0; t < params.num_rows; ++t) {
    const int64_t row = params.rows != nullptr ? params.rows[t] : t;
    std::memcpy(params.out + t * params.out_row_stride,
                params.x + row * params.x_row_stride,
                static_cast<size_t>(params.columns) * sizeof(float));
  }
}

}  // namespace kvasir::kernels
