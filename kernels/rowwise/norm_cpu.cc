#include <cmath>

#include "kernels/device/parallel.h"
#include "kernels/device/stream.h"
#include "kernels/rowwise/norm.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/rowwise/norm_cpu.cc"
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

// Sums numbers in 16 lanes. add(sum, x) returns the sum after x; it must work
// for vectors and for single floats.
template <typename Add>
float SumOver(const float* x, int64_t columns, const Add& add) {
  Wide lanes = MakeWide([](int) { return hn::Zero(kFloats); });
  int64_t i = 0;
  for (; i + kLanes <= columns; i += kLanes) {
    for (int v = 0; v < kVecsPerWide; ++v) {
      lanes.part[v] = add(lanes.part[v], LoadFloats(x + i + v * kVecLanes));
    }
  }
  HWY_ALIGN float rest[kLanes];
  StoreWide(lanes, rest);
  for (int lane = 0; i < columns; ++i, ++lane) {
    rest[lane] = add(rest[lane], x[i]);
  }
  return TreeSum(rest);
}

struct AddNumber {
  HWY_INLINE Vec operator()(Vec sum, Vec x) const { return hn::Add(sum, x); }
  float operator()(float sum, float x) const { return sum + x; }
};
struct AddSquare {
  HWY_INLINE Vec operator()(Vec sum, Vec x) const { return Fma(x, x, sum); }
  float operator()(float sum, float x) const { return std::fma(x, x, sum); }
};
struct AddSquareAbout {
  float mean;
  HWY_INLINE Vec operator()(Vec sum, Vec x) const {
    return AddSquare()(sum, hn::Sub(x, Broadcast(mean)));
  }
  float operator()(float sum, float x) const {
    return AddSquare()(sum, x - mean);
  }
};

void RmsNormRow(const NormArgs& params, const float* x, float* out) {
  const int64_t columns = params.columns;
  const float mean =
      SumOver(x, columns, AddSquare()) / static_cast<float>(columns);
  const float inverse = 1.0f / std::sqrt(mean + params.eps);
  const Vec factor = Broadcast(inverse);
  int64_t i = 0;
  for (; i + kVecLanes <= columns; i += kVecLanes) {
    hn::StoreU(hn::Mul(hn::Mul(LoadFloats(x + i), factor),
                       LoadFloats(params.weight + i)),
               kFloats, out + i);
  }
  for (; i < columns; ++i) out[i] = (x[i] * inverse) * params.weight[i];
}

void LayerNormRow(const NormArgs& params, const float* x, float* out) {
  const int64_t columns = params.columns;
  const float mean =
      SumOver(x, columns, AddNumber()) / static_cast<float>(columns);
  const float variance =
      SumOver(x, columns, AddSquareAbout{mean}) / static_cast<float>(columns);
  const float inverse = 1.0f / std::sqrt(variance + params.eps);
  const Vec centre = Broadcast(mean);
  const Vec factor = Broadcast(inverse);
  int64_t i = 0;
  for (; i + kVecLanes <= columns; i += kVecLanes) {
    const Vec normal = hn::Mul(hn::Sub(LoadFloats(x + i), centre), factor);
    hn::StoreU(
        Fma(normal, LoadFloats(params.weight + i), LoadFloats(params.bias + i)),
        kFloats, out + i);
  }
  for (; i < columns; ++i) {
    out[i] =
        std::fma((x[i] - mean) * inverse, params.weight[i], params.bias[i]);
  }
}

void NormRows(const NormArgs& params, int64_t begin, int64_t end) {
  const int64_t columns = params.columns;
  for (int64_t t = begin; t < end; ++t) {
    float* x = params.x + params.Begin(t);
    if (params.residual != nullptr) {
      AddRow(params.residual + t * columns, columns, x);
    }
    if (params.out == nullptr) continue;
    float* out = params.out + params.Begin(t);
    if (params.kind == NormKind::kRms) {
      RmsNormRow(params, x, out);
    } else {
      LayerNormRow(params, x, out);
    }
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

void NormSimd(const NormArgs& params, CpuStream& stream) {
  ForRows(stream, params.num_rows, params.columns,
          [&](int64_t begin, int64_t end, int /*thread*/) {
            HWY_DYNAMIC_DISPATCH(NormRows)(params, begin, end);
          });
}

}  // namespace kvasir::kernels
#endif  // HWY_ONCE
