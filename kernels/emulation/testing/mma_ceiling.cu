#include "kernels/emulation/testing/mma_ceiling.h"
#include "kernels/simt/grid.h"
#include "kernels/simt/launch.h"
#include "kernels/simt/mma.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kCtas = kMmaCeilingThreads / kThreads;
// The number of independent products, down and across: eight sums, so that a
// warp never waits for one of them.
constexpr uint32_t kDown = 2;
constexpr uint32_t kAcross = 4;
constexpr double kOperations = 2.0 * 16 * 8 * 16;

// Two numbers out of 1, 1.25, 1.5 and 1.75 with either sign. Sums stay finite,
// and bits change as often as in a model's products (power limits clocks).
KVASIR_DEVICE uint32_t Numbers(uint32_t index) {
  uint32_t bits = (index * simt::kWarp + simt::Lane() + 1) * 2654435761u;
  bits ^= bits >> 15;
  return 0x3f803f80u | (bits & 0x80608060u);
}

KVASIR_KERNEL_OF(kThreads, kCtas) MmaCeilingKernel(MmaCeilingArgs args) {
  uint32_t a[kDown][4];
  uint32_t b[kAcross][2];
  KVASIR_UNROLL
  for (uint32_t i = 0; i < 4 * kDown; ++i) a[i / 4][i % 4] = Numbers(i);
  KVASIR_UNROLL
  for (uint32_t i = 0; i < 2 * kAcross; ++i) {
    b[i / 2][i % 2] = Numbers(4 * kDown + i);
  }
  float d[kDown][kAcross][4] = {};
  for (uint32_t step = 0; step < args.steps; ++step) {
    KVASIR_UNROLL
    for (uint32_t m = 0; m < kDown; ++m) {
      KVASIR_UNROLL
      for (uint32_t n = 0; n < kAcross; ++n) simt::MmaBf16(d[m][n], a[m], b[n]);
    }
  }
  float sum = 0.0f;
  KVASIR_UNROLL
  for (uint32_t i = 0; i < 4 * kDown * kAcross; ++i) {
    sum += d[i / (4 * kAcross)][i / 4 % kAcross][i % 4];
  }
  args.out[simt::CtaX() * simt::Threads() + simt::Thread()] = sum;
}

}  // namespace

double LaunchMmaCeiling(const MmaCeilingArgs& args, Launcher& launcher) {
  KernelLaunch launch;
  launch.name = "mma_ceiling";
  launch.grid_x = kCtas * static_cast<uint32_t>(launcher.multiprocessors());
  launch.threads = kThreads;
  simt::Launch(launcher, launch, MmaCeilingKernel, args);
  return kOperations * kDown * kAcross * args.steps * launch.grid_x *
         (kThreads / simt::kWarp);
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
