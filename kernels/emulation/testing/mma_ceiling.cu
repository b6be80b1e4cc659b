#include "kernels/emulation/testing/mma_ceiling.h"
#include "kernels/simt/grid.h"
#include "kernels/simt/launch.h"
#include "kernels/simt/mma.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kCtas = kMmaCeilingThreads / kThreads;
// A warp computes kDown x kAcross = 8 independent products in a step, so that
// it never waits for the result of the previous one.
constexpr uint32_t kDown = 2;
constexpr uint32_t kAcross = 4;
constexpr double kOperations = 2.0 * 16 * 8 * 16;

// Returns two bf16 numbers out of 1, 1.25, 1.5 and 1.75 with either sign. With
// these numbers, sums stay finite, and bits change as often as in a real model.
// This matters because a GPU that needs more power lowers its clock.
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
