#include "kernels/device/parallel.h"
#include "kernels/device/stream.h"
#include "kernels/rowwise/activation.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/rowwise/activation_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/simd/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {
namespace {

struct GeluOf {
  HWY_INLINE Vec operator()(Vec x) const { return GeluVec(x); }
  float operator()(float x) const { return Gelu(x); }
};
struct GeluTanhOf {
  HWY_INLINE Vec operator()(Vec x) const { return GeluTanhVec(x); }
  float operator()(float x) const { return GeluTanh(x); }
};
struct ReluOf {
  HWY_INLINE Vec operator()(Vec x) const { return ReluVec(x); }
  float operator()(float x) const { return Relu(x); }
};

struct SoftCapOf {
  float cap;
  HWY_INLINE Vec operator()(Vec x) const { return SoftCapVec(x, cap); }
  float operator()(float x) const { return SoftCap(x, cap); }
};

template <typename Function>
void Activate(const float* x, int64_t count, float* out,
              const Function& function = {}) {
  int64_t i = 0;
  for (; i + kVecLanes <= count; i += kVecLanes) {
    hn::StoreU(function(LoadFloats(x + i)), kFloats, out + i);
  }
  for (; i < count; ++i) out[i] = function(x[i]);
}

void ActivateRows(const ActivationArgs& params, int64_t begin, int64_t end) {
  const float* const x = params.x + begin * params.columns;
  float* const out = params.out + begin * params.columns;
  const int64_t count = (end - begin) * params.columns;
  switch (params.kind) {
    case ActivationKind::kGelu:
      return Activate<GeluOf>(x, count, out);
    case ActivationKind::kGeluTanh:
      return Activate<GeluTanhOf>(x, count, out);
    case ActivationKind::kRelu:
      return Activate<ReluOf>(x, count, out);
    case ActivationKind::kSoftCap:
      return Activate<SoftCapOf>(x, count, out, {params.cap});
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvasir::kernels {
namespace {
HWY_EXPORT(ActivateRows);
}  // namespace

void ActivationSimd(const ActivationArgs& params, CpuStream& stream) {
  // The cost per number is relative to a copy: an exponential and a division
  // take about as long as copying four numbers.
  const int64_t cost = params.kind == ActivationKind::kRelu ? 1 : 4;
  ForRows(stream, params.num_rows, cost * params.columns,
          [&](int64_t begin, int64_t end, int /*thread*/) {
            HWY_DYNAMIC_DISPATCH(ActivateRows)(params, begin, end);
          });
}

}  // namespace kvasir::kernels
#endif  // HWY_ONCE
