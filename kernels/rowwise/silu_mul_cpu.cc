#include "kernels/device/parallel.h"
#include "kernels/device/stream.h"
#include "kernels/rowwise/silu_mul.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/rowwise/silu_mul_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/simd/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {
namespace {

struct SiluOf {
  HWY_INLINE Vec operator()(Vec x) const { return SiluVec(x); }
  float operator()(float x) const { return Silu(x); }
};
struct GeluTanhGate {
  HWY_INLINE Vec operator()(Vec x) const { return GeluTanhVec(x); }
  float operator()(float x) const { return GeluTanh(x); }
};

template <typename Function>
void Multiply(const SiluMulArgs& params, int64_t begin, int64_t end) {
  const Function function;
  const int64_t features = params.features;
  for (int64_t t = begin; t < end; ++t) {
    const float* gate = params.gate_up + t * 2 * features;
    const float* up = gate + features;
    float* out = params.out + t * features;
    int64_t i = 0;
    for (; i + kVecLanes <= features; i += kVecLanes) {
      const Vec factor = function(LoadFloats(gate + i));
      hn::StoreU(hn::Mul(factor, LoadFloats(up + i)), kFloats, out + i);
    }
    for (; i < features; ++i) out[i] = function(gate[i]) * up[i];
  }
}

void MultiplyRows(const SiluMulArgs& params, int64_t begin, int64_t end) {
  switch (params.gate) {
    case GateKind::kSilu:
      return Multiply<SiluOf>(params, begin, end);
    case GateKind::kGeluTanh:
      return Multiply<GeluTanhGate>(params, begin, end);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvasir::kernels {
namespace {
HWY_EXPORT(MultiplyRows);
}  // namespace

void SiluMulSimd(const SiluMulArgs& params, CpuStream& stream) {
  // The factor is 4, because an exponential and a division take about as long
  // as copying four numbers.
  ForRows(stream, params.num_rows, 4 * params.features,
          [&](int64_t begin, int64_t end, int /*thread*/) {
            HWY_DYNAMIC_DISPATCH(MultiplyRows)(params, begin, end);
          });
}

}  // namespace kvasir::kernels
#endif  // HWY_ONCE
