// The kernels of attention_mass-inl.h, which has their cost.
#include "kernels/attention/cuda/attention_mass-inl.h"
#include "kernels/attention/cuda/attention_mass.h"
#include "kernels/attention/cuda/prefill_attention.h"
#include "kernels/simt/launch.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {
namespace {

// The most CTAs of a kernel on a multiprocessor. Their shared memory is about
// as large as that of attention_plain.
constexpr int64_t kMassCtas = 3;

template <typename T>
KVASIR_KERNEL(kPlainThreads)
MassTotalsKernel(AttentionKernelArgs args) {
  MassAttention<T>(args).FindTotals();
}
template <typename T>
KVASIR_KERNEL(kPlainThreads)
MassKernel(AttentionKernelArgs args) {
  MassAttention<T>(args).AddMass();
}

}  // namespace

void LaunchMass(const AttentionKernelArgs& args, Launcher& launcher) {
  const AttentionDevice& device = args.device;
  VisitDType(device.dtype, [&](auto type) {
    using T = decltype(type);
    KernelLaunch launch;
    launch.name = "attention_mass_totals";
    launch.threads = kPlainThreads;
    launch.shared_bytes = static_cast<uint32_t>(PlainScoreBytes(device));
    launch.grid_x =
        StayingCtas(device, launch.shared_bytes, kMassCtas, launcher);
    simt::Launch(launcher, launch, MassTotalsKernel<T>, args);
    launch.name = "attention_mass";
    launch.shared_bytes = static_cast<uint32_t>(MassSharedBytes(device));
    launch.grid_x =
        StayingCtas(device, launch.shared_bytes, kMassCtas, launcher);
    simt::Launch(launcher, launch, MassKernel<T>, args);
  });
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
