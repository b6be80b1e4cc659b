// add_rows and gather_rows: the small row movements between layers. C++17.
#pragma once

#include <cstdint>

namespace kvasir::kernels {

// y[t, i] += x[t, i]. x_row_stride 0 adds one row (a bias) to all.
struct AddRowsParams {
  float* y = nullptr;        // [T, N]
  int64_t y_row_stride = 0;  // in elements
  const float* x = nullptr;  // [T, N] or [N]
  int64_t x_row_stride = 0;  // in elements
  int64_t num_rows = 0;
  int64_t columns = 0;
};

// out[t, :] = x[rows[t], :]; a null `rows` copies row t.
struct GatherRowsParams {
  const float* x = nullptr;
  int64_t x_row_stride = 0;       // in elements
  const int32_t* rows = nullptr;  // [T]
  float* out = nullptr;           // [T, N], not overlapping x
  int64_t out_row_stride = 0;     // in elements
  int64_t num_rows = 0;
  int64_t columns = 0;
};

class CpuStream;
void AddRowsReference(const AddRowsParams& params, CpuStream& stream);
void AddRowsSimd(const AddRowsParams& params, CpuStream& stream);
void GatherRowsReference(const GatherRowsParams& params, CpuStream& stream);
void GatherRowsSimd(const GatherRowsParams& params, CpuStream& stream);

}  // namespace kvasir::kernels
