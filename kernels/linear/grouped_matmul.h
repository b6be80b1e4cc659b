// grouped_matmul: the products of several groups of rows, each with a weight of
// its own, as one op. In a mixture of experts, a group is the rows of one
// expert. C++17.
#pragma once

#include <cstdint>

#include "kernels/device/device_ptr.h"
#include "kernels/device/dtype.h"
#include "kernels/linear/matmul.h"

namespace kvasir::kernels {

// y[t, n] = chain(t, n) for first_rows[g] <= t < first_rows[g + 1], with the
// chain of matmul (matmul.h) over the weight of group g. So each row has the
// same bits as from matmul, whatever the sizes of groups.
template <template <typename> class Ptr>
struct GroupedMatmulParamsIn {
  Ptr<const float> x = nullptr;  // [T, K], rows x_row_stride apart
  int64_t x_row_stride = 0;      // in elements
  int64_t num_rows = 0;          // T
  // [num_groups + 1], ascending from 0 to T. Groups may be empty; their weights
  // are not read.
  Ptr<const int32_t> first_rows = nullptr;
  int64_t num_groups = 0;
  // The weight of group 0. The weights of all groups follow each other in
  // memory: group g's begins g * weight.bytes() bytes after this one.
  PackedMatrixIn<Ptr> weight;
  Ptr<float> y = nullptr;     // [T, N], rows y_row_stride apart
  int64_t y_row_stride = 0;   // in elements
  DType dtype = DType::kF32;  // the type of x and y

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(x, first_rows, weight.data, y);
  }
  // Returns the product of group `group`, which has the rows [begin, end).
  MatmulParamsIn<Ptr> Group(int64_t group, int64_t begin, int64_t end) const {
    MatmulParamsIn<Ptr> product;
    product.x = x + begin * x_row_stride;
    product.x_row_stride = x_row_stride;
    product.num_rows = end - begin;
    product.weight = weight;
    product.weight.data = OffsetBytes(weight.data, group * weight.bytes());
    product.y = y + begin * y_row_stride;
    product.y_row_stride = y_row_stride;
    product.dtype = dtype;
    product.y_dtype = dtype;
    return product;
  }
};
using GroupedMatmulParams = GroupedMatmulParamsIn<DevicePtr>;
using GroupedMatmulArgs = GroupedMatmulParamsIn<LaunchPtr>;

class CpuStream;
// `first_parts` is scratch for num_groups + 1 integers.
void GroupedMatmulReference(const GroupedMatmulArgs& params, float* scratch,
                            int64_t* first_parts, CpuStream& stream);
void GroupedMatmulSimd(const GroupedMatmulArgs& params, float* scratch,
                       int64_t* first_parts, CpuStream& stream);

}  // namespace kvasir::kernels
