// silu_mul on a GPU: one thread for each pack (16 bytes or one number) of the
// output (simt::LaunchOnRows).
//
// Activations (gate_up, out) have the type args.dtype, whatever their pointers'
// type.
//
// Layout: rows of 2 F and F numbers without gaps. They are read 16 bytes at a
// time if the sizes of rows and the pointers are multiples of 16 bytes,
// otherwise one number at a time.
//
// Bytes: gate and up are read once, and out is written once. A row with B bytes
// per number takes 3 F B.
//
// Operations: about 20 in float32 per number of the output, with one
// exponential and one division. With 16-bit numbers these are 3.3 operations
// per byte, so the bytes limit the kernel's speed.
// Shortest possible time: the bytes divided by the memory's bandwidth.
#include "kernels/rowwise/silu_mul.h"
#include "kernels/simt/activations.h"
#include "kernels/simt/rows.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {
namespace {

struct SiluOf {
  KVASIR_DEVICE float operator()(float x) const { return simt::Silu(x); }
};
struct GeluTanhOf {
  KVASIR_DEVICE float operator()(float x) const { return simt::GeluTanh(x); }
};

template <typename T, int n, typename Function>
KVASIR_DEVICE void Multiply(const simt::OnRows<SiluMulArgs>& on,
                            const Function& function) {
  using Pack = simt::Pack<T, n>;
  const SiluMulArgs& args = on.args;
  const int64_t features = args.features;
  const auto* const gate_up = reinterpret_cast<const T*>(args.gate_up);
  auto* const out = reinterpret_cast<T*>(args.out);
  simt::ForPacksOfRows<n>(
      on, args.num_rows, features, [&](int64_t row, int64_t column) {
        const T* const gate = gate_up + row * 2 * features + column;
        const auto gates = simt::LoadOnce(reinterpret_cast<const Pack*>(gate));
        const auto ups =
            simt::LoadOnce(reinterpret_cast<const Pack*>(gate + features));
        Pack product;
        KVASIR_UNROLL
        for (int k = 0; k < n; ++k) {
          product.number[k] =
              simt::FromFloat<T>(function(simt::ToFloat(gates.number[k])) *
                                 simt::ToFloat(ups.number[k]));
        }
        simt::StoreGlobal(
            reinterpret_cast<Pack*>(out + row * features + column), product);
      });
}

template <typename T, int n>
KVASIR_KERNEL(simt::kRowThreads)
SiluMulKernel(simt::OnRows<SiluMulArgs> on) {
  switch (on.args.gate) {
    case GateKind::kSilu:
      return Multiply<T, n>(on, SiluOf());
    case GateKind::kGeluTanh:
      return Multiply<T, n>(on, GeluTanhOf());
  }
}

template <typename T>
void LaunchSiluMul(const SiluMulArgs& args, Launcher& launcher) {
  constexpr int n = simt::kWidePack<T>;
  if (simt::WideRows<T>(args.features, args.gate_up, args.out)) {
    simt::LaunchOnRows(launcher, "silu_mul", args.num_rows, args.features / n,
                       SiluMulKernel<T, n>, args);
  } else {
    simt::LaunchOnRows(launcher, "silu_mul", args.num_rows, args.features,
                       SiluMulKernel<T, 1>, args);
  }
}

}  // namespace

void SiluMulCuda(const SiluMulArgs& args, Launcher& launcher) {
  VisitDType(args.dtype,
             [&](auto type) { LaunchSiluMul<decltype(type)>(args, launcher); });
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
