// add_rows, sum_rows and gather_rows: ops that add, sum and copy rows between
// layers and between ranks. C++17.
#pragma once

#include <cstdint>

#include "kernels/device/device_ptr.h"
#include "kernels/device/dtype.h"

namespace kvasir::kernels {

// y[t, i] += x[t, i], in float32. If x_row_stride is 0, x is a single row (a
// bias) that is added to all rows of y. This row is float32, whatever the type
// of activations.
template <template <typename> class Ptr>
struct AddRowsParamsIn {
  Ptr<float> y = nullptr;        // [T, N]
  int64_t y_row_stride = 0;      // in elements
  Ptr<const float> x = nullptr;  // [T, N] or [N]
  int64_t x_row_stride = 0;      // in elements
  int64_t num_rows = 0;          // T
  int64_t columns = 0;           // N
  DType dtype = DType::kF32;     // the type of activations

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(y, x);
  }
};
using AddRowsParams = AddRowsParamsIn<DevicePtr>;
using AddRowsArgs = AddRowsParamsIn<LaunchPtr>;

// out[i] = x[0, i] + x[1, i] + ... in that order, in float32, rounded once.
// There is at least one row.
template <template <typename> class Ptr>
struct SumRowsParamsIn {
  Ptr<const float> x = nullptr;  // [T, N]
  int64_t x_row_stride = 0;      // in elements
  Ptr<float> out = nullptr;      // [N], not overlapping x
  int64_t num_rows = 0;          // T
  int64_t columns = 0;           // N
  DType dtype = DType::kF32;     // the type of activations

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(x, out);
  }
};
using SumRowsParams = SumRowsParamsIn<DevicePtr>;
using SumRowsArgs = SumRowsParamsIn<LaunchPtr>;

// out[t, :] = x[rows[t], :], without changing a bit. If `rows` is null, row t
// of x is copied.
template <template <typename> class Ptr>
struct GatherRowsParamsIn {
  Ptr<const float> x = nullptr;
  int64_t x_row_stride = 0;           // in elements
  Ptr<const int32_t> rows = nullptr;  // [T]
  Ptr<float> out = nullptr;           // [T, N], not overlapping x
  int64_t out_row_stride = 0;         // in elements
  int64_t num_rows = 0;               // T
  int64_t columns = 0;                // N
  DType dtype = DType::kF32;          // the type of activations

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(x, rows, out);
  }
};
using GatherRowsParams = GatherRowsParamsIn<DevicePtr>;
using GatherRowsArgs = GatherRowsParamsIn<LaunchPtr>;

class CpuStream;
void AddRowsReference(const AddRowsArgs& params, CpuStream& stream);
void AddRowsSimd(const AddRowsArgs& params, CpuStream& stream);
void SumRowsReference(const SumRowsArgs& params, CpuStream& stream);
void SumRowsSimd(const SumRowsArgs& params, CpuStream& stream);
void GatherRowsReference(const GatherRowsArgs& params, CpuStream& stream);
void GatherRowsSimd(const GatherRowsArgs& params, CpuStream& stream);

}  // namespace kvasir::kernels
