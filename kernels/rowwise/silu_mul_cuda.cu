// silu_mul on a GPU: a thread to each pack of the output, over as many CTAs as
// there is work for.
//
// Activations (gate_up, out) are of args.dtype whatever their pointers say.
// Layout: rows of 2 F and F numbers without gaps; 16 bytes at a time where F
// and the pointers allow it, one number elsewhere.
// Bytes: gate and up are read and out is written once, 3 F B of a row with B to
// a number. Operations: about 8 of float32 to a number of the output, one
// exponential and one division among them; at 16 bits that is 1.3 to a byte, so
// it is bound by its bytes. Floor: bytes over the memory's bandwidth.
#include "kernels/simt/launch.h"
#include "kernels/simt/op_table.h"
#include "kernels/simt/rows.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {
namespace {

constexpr uint32_t kThreads = 256;
// Enough to fill any GPU; threads go on in steps of the grid.
constexpr int64_t kMostCtas = 1 << 16;

// Exp2 has no result for gates below -128: 1 + infinity then makes them 0.
KVASIR_DEVICE float SiluOf(float gate) {
  return gate / (1.0f + simt::Exp2(-gate * simt::kLog2E));
}

template <typename T, int n>
KVASIR_KERNEL(kThreads)
SiluMulKernel(SiluMulArgs args) {
  using Pack = simt::Pack<T, n>;
  const auto* const gate_up = reinterpret_cast<const T*>(args.gate_up);
  auto* const out = reinterpret_cast<T*>(args.out);
  const int64_t features = args.features;
  const int64_t packs = features / n;
  const int64_t step = int64_t{simt::CtasX()} * kThreads;
  for (int64_t i = int64_t{simt::CtaX()} * kThreads + simt::Thread();
       i < args.num_rows * packs; i += step) {
    const int64_t row = i / packs;
    const int64_t column = i % packs * n;
    const T* const gate = gate_up + row * 2 * features + column;
    const auto gates = simt::LoadOnce(reinterpret_cast<const Pack*>(gate));
    const auto ups =
        simt::LoadOnce(reinterpret_cast<const Pack*>(gate + features));
    Pack product;
    KVASIR_UNROLL
    for (int k = 0; k < n; ++k) {
      product.number[k] =
          simt::FromFloat<T>(SiluOf(simt::ToFloat(gates.number[k])) *
                             simt::ToFloat(ups.number[k]));
    }
    simt::StoreGlobal(reinterpret_cast<Pack*>(out + row * features + column),
                      product);
  }
}

template <typename T>
void LaunchSiluMul(const SiluMulArgs& args, Launcher& launcher) {
  const bool wide = simt::WideRows<T>(args.features, args.gate_up, args.out);
  const int64_t packs =
      args.num_rows * (args.features / (wide ? simt::kWidePack<T> : 1));
  const int64_t ctas = (packs + kThreads - 1) / kThreads;
  KernelLaunch launch;
  launch.name = "silu_mul";
  launch.grid_x = static_cast<uint32_t>(ctas < kMostCtas ? ctas : kMostCtas);
  launch.threads = kThreads;
  simt::Launch(
      launcher, launch,
      wide ? SiluMulKernel<T, simt::kWidePack<T>> : SiluMulKernel<T, 1>, args);
}

}  // namespace

void SiluMulCuda(const SiluMulArgs& args, Launcher& launcher) {
  VisitDType(args.dtype,
             [&](auto type) { LaunchSiluMul<decltype(type)>(args, launcher); });
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
