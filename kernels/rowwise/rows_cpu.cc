#include <cstring>

#include "kernels/device/parallel.h"
#include "kernels/device/stream.h"
#include "kernels/rowwise/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/rowwise/rows_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/simd/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {
namespace {

void Add(const AddRowsArgs& params, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    float* y = params.y + t * params.y_row_stride;
    const float* x = params.x + t * params.x_row_stride;
    int64_t i = 0;
    for (; i + kVecLanes <= params.columns; i += kVecLanes) {
      hn::StoreU(hn::Add(LoadFloats(y + i), LoadFloats(x + i)), kFloats, y + i);
    }
    for (; i < params.columns; ++i) y[i] = y[i] + x[i];
  }
}

// Computes columns [begin, end) of the sum of all rows.
void Sum(const SumRowsArgs& params, int64_t begin, int64_t end) {
  int64_t i = begin;
  for (; i + kVecLanes <= end; i += kVecLanes) {
    Vec sum = LoadFloats(params.x + i);
    for (int64_t t = 1; t < params.num_rows; ++t) {
      sum = hn::Add(sum, LoadFloats(params.x + t * params.x_row_stride + i));
    }
    hn::StoreU(sum, kFloats, params.out + i);
  }
  for (; i < end; ++i) {
    float sum = params.x[i];
    for (int64_t t = 1; t < params.num_rows; ++t) {
      sum = sum + params.x[t * params.x_row_stride + i];
    }
    params.out[i] = sum;
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvasir::kernels {
namespace {
HWY_EXPORT(Add);
HWY_EXPORT(Sum);
}  // namespace

void AddRowsSimd(const AddRowsArgs& params, CpuStream& stream) {
  ForRows(stream, params.num_rows, params.columns,
          [&](int64_t begin, int64_t end, int /*thread*/) {
            HWY_DYNAMIC_DISPATCH(Add)(params, begin, end);
          });
}

void SumRowsSimd(const SumRowsArgs& params, CpuStream& stream) {
  ForRows(stream, params.columns, params.num_rows,
          [&](int64_t begin, int64_t end, int /*thread*/) {
            HWY_DYNAMIC_DISPATCH(Sum)(params, begin, end);
          });
}

void GatherRowsSimd(const GatherRowsArgs& params, CpuStream& stream) {
  ForRows(stream, params.num_rows, params.columns,
          [&](int64_t begin, int64_t end, int /*thread*/) {
            for (int64_t t = begin; t < end; ++t) {
              const int64_t row = params.rows != nullptr ? params.rows[t] : t;
              std::memcpy(params.out + t * params.out_row_stride,
                          params.x + row * params.x_row_stride,
                          static_cast<size_t>(params.columns) * sizeof(float));
            }
          });
}

}  // namespace kvasir::kernels
#endif  // HWY_ONCE
