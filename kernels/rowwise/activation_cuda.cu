// activation on a GPU: one thread for each pack (16 bytes or one number) of the
// output (simt::LaunchOnRows).
//
// Activations (x, out) have the type args.dtype, whatever their pointers' type.
//
// Layout: rows of N numbers without gaps. They are read 16 bytes at a time if
// the size of a row and the pointers are multiples of 16 bytes, otherwise one
// number at a time.
//
// Bytes: each number is read once and written once. A row with B bytes per
// number takes 2 N B.
//
// Operations per number, in float32: about 30 for gelu, about 20 for gelu_tanh,
// 2 for relu. With 16-bit numbers, gelu has about 8 operations per byte, as
// many as a GPU can do while it moves a byte.
//
// Shortest possible time: the bytes divided by the memory's bandwidth.
#include "kernels/rowwise/activation.h"
#include "kernels/simd/scalar_math.h"
#include "kernels/simt/activations.h"
#include "kernels/simt/rows.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {
namespace {

// The same as NormalTail (scalar_math.h), but with the device's exponential.
KVASIR_DEVICE float TailOf(float a) {
  namespace c = normal_constants;
  if (a > c::kFarthest) a = c::kFarthest;
  const float t = 1.0f / simt::Fma(c::kSlope, a, 1.0f);
  float p = c::kC9;
  p = simt::Fma(p, t, c::kC8);
  p = simt::Fma(p, t, c::kC7);
  p = simt::Fma(p, t, c::kC6);
  p = simt::Fma(p, t, c::kC5);
  p = simt::Fma(p, t, c::kC4);
  p = simt::Fma(p, t, c::kC3);
  p = simt::Fma(p, t, c::kC2);
  p = simt::Fma(p, t, c::kC1);
  p = simt::Fma(p, t, c::kC0);
  return simt::Exp2(a * a * (-0.5f * simt::kLog2E)) * (p * t);
}

struct GeluOf {
  KVASIR_DEVICE float operator()(float x) const {
    if (x < -normal_constants::kFarthest) return 0.0f;
    const float tail = TailOf(std::fabs(x));
    return x * (x < 0.0f ? tail : 1.0f - tail);
  }
};
struct GeluTanhOf {
  KVASIR_DEVICE float operator()(float x) const { return simt::GeluTanh(x); }
};
struct SoftCapOf {
  float cap;
  KVASIR_DEVICE float operator()(float x) const {
    return simt::SoftCap(x, cap);
  }
};
struct ReluOf {
  KVASIR_DEVICE float operator()(float x) const { return x < 0.0f ? 0.0f : x; }
};

template <typename T, int n, typename Function>
KVASIR_DEVICE void Activate(const simt::OnRows<ActivationArgs>& on,
                            const Function& function) {
  using Pack = simt::Pack<T, n>;
  const ActivationArgs& args = on.args;
  const auto* const x = reinterpret_cast<const T*>(args.x);
  auto* const out = reinterpret_cast<T*>(args.out);
  simt::ForPacksOfRows<n>(
      on, args.num_rows, args.columns, [&](int64_t row, int64_t column) {
        const int64_t at = row * args.columns + column;
        // This must not be LoadOnce, because `out` may be the same memory as x.
        Pack pack = simt::LoadGlobal(reinterpret_cast<const Pack*>(x + at));
        KVASIR_UNROLL
        for (int k = 0; k < n; ++k) {
          pack.number[k] =
              simt::FromFloat<T>(function(simt::ToFloat(pack.number[k])));
        }
        simt::StoreGlobal(reinterpret_cast<Pack*>(out + at), pack);
      });
}

template <typename T, int n>
KVASIR_KERNEL(simt::kRowThreads)
ActivationKernel(simt::OnRows<ActivationArgs> on) {
  switch (on.args.kind) {
    case ActivationKind::kGelu:
      return Activate<T, n>(on, GeluOf());
    case ActivationKind::kGeluTanh:
      return Activate<T, n>(on, GeluTanhOf());
    case ActivationKind::kRelu:
      return Activate<T, n>(on, ReluOf());
    case ActivationKind::kSoftCap:
      return Activate<T, n>(on, SoftCapOf{on.args.cap});
  }
}

template <typename T>
void LaunchActivation(const ActivationArgs& args, Launcher& launcher) {
  constexpr int n = simt::kWidePack<T>;
  if (simt::WideRows<T>(args.columns, args.x, args.out)) {
    simt::LaunchOnRows(launcher, "activation", args.num_rows, args.columns / n,
                       ActivationKernel<T, n>, args);
  } else {
    simt::LaunchOnRows(launcher, "activation", args.num_rows, args.columns,
                       ActivationKernel<T, 1>, args);
  }
}

}  // namespace

void ActivationCuda(const ActivationArgs& args, Launcher& launcher) {
  VisitDType(args.dtype, [&](auto type) {
    LaunchActivation<decltype(type)>(args, launcher);
  });
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
