#include <cmath>

#include "kernels/device/parallel.h"
#include "kernels/device/stream.h"
#include "kernels/rowwise/rms_norm.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/rowwise/rms_norm_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/simd/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {
namespace {

void AddRow(const float* residual, int64_t columns, float* x) {
  int64_t i = 0;
  for (; i + kVecLanes <= columns; i += kVecLanes) {
    hn::StoreU(hn::Add(LoadFloats(x + i), LoadFloats(residual + i)), kFloats,
               x + i);
  }
  for (; i < columns; ++i) x[i] = x[i] + residual[i];
}

float SumOfSquares(const float* x, int64_t columns) {
  Wide lanes = MakeWide([](int) { return hn::Zero(kFloats); });
  int64_t i = 0;
  for (; i + kLanes <= columns; i += kLanes) {
    for (int v = 0; v < kVecsPerWide; ++v) {
      const Vec number = LoadFloats(x + i + v * kVecLanes);
      lanes.part[v] = Fma(number, number, lanes.part[v]);
    }
  }
  HWY_ALIGN float rest[kLanes];
  StoreWide(lanes, rest);
  for (int lane = 0; i < columns; ++i, ++lane) {
    rest[lane] = std::fma(x[i], x[i], rest[lane]);
  }
  return TreeSum(rest);
}

void NormRows(const RmsNormArgs& params, int64_t begin, int64_t end) {
  const int64_t columns = params.columns;
  for (int64_t t = begin; t < end; ++t) {
    float* x = params.x + t * columns;
    if (params.residual != nullptr) {
      AddRow(params.residual + t * columns, columns, x);
    }
    if (params.out == nullptr) continue;
    const float mean = SumOfSquares(x, columns) / static_cast<float>(columns);
    const float inverse = 1.0f / std::sqrt(mean + params.eps);
    const Vec factor = Broadcast(inverse);
    float* out = params.out + t * columns;
    int64_t i = 0;
    for (; i + kVecLanes <= columns; i += kVecLanes) {
      hn::StoreU(hn::Mul(hn::Mul(LoadFloats(x + i), factor),
                         LoadFloats(params.weight + i)),
                 kFloats, out + i);
    }
    for (; i < columns; ++i) out[i] = (x[i] * inverse) * params.weight[i];
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvasir::kernels {
namespace {
HWY_EXPORT(NormRows);
}  // namespace

void RmsNormSimd(const RmsNormArgs& params, CpuStream& stream) {
  ForRows(stream, params.num_rows, params.columns,
          [&](int64_t begin, int64_t end, int /*thread*/) {
            HWY_DYNAMIC_DISPATCH(NormRows)(params, begin, end);
          });
}

}  // namespace kvasir::kernels
#endif  // HWY_ONCE
