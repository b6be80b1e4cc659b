// copy_pages on a GPU. All CTAs with the same x index copy the page of one
// pair. Each thread issues four loads before its first store.
//
// Layout: a thread copies 16 bytes at a time if the addresses of arenas and the
// sizes of pages are multiples of 16, as in every cache. Otherwise it copies 4
// bytes or one byte at a time. The host pool is pinned memory, which threads
// access over the bus.
//
// Bytes per pair: one page is read and one page is written. Lower bound of the
// time: the bytes divided by the bandwidth of the memory, or of the bus for
// copies to and from the host pool.
#include <algorithm>

#include "kernels/latents/copy_pages.h"
#include "kernels/simt/launch.h"
#include "kernels/simt/rows.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {
namespace {

constexpr uint32_t kThreads = 256;
constexpr int kUnderWay = 4;
// The number of units that a CTA copies at a time. A unit has 16, 4 or 1 bytes.
constexpr int64_t kUnitsAtOnce = int64_t{kThreads} * kUnderWay;

template <typename Unit>
KVASIR_DEVICE Unit LoadUnit(const Unit* from) {
  // LoadOnce is allowed, because a launch never writes a page that it reads.
  if constexpr (sizeof(Unit) == 1) {
    return simt::LoadGlobal(from);
  } else {
    return simt::LoadOnce(from);
  }
}

template <typename Unit>
KVASIR_KERNEL(kThreads)
CopyPagesKernel(CopyPagesArgs args) {
  const PagePair pair = args.pairs[simt::CtaX()];
  if (pair.from < 0) return;
  const auto* const from =
      reinterpret_cast<const Unit*>(static_cast<const char*>(args.from) +
                                    int64_t{pair.from} * args.page_bytes);
  auto* const to = reinterpret_cast<Unit*>(static_cast<char*>(args.to) +
                                           int64_t{pair.to} * args.page_bytes);
  const int64_t units = args.page_bytes / static_cast<int64_t>(sizeof(Unit));
  for (int64_t first = simt::CtaY() * kUnitsAtOnce + simt::Thread();
       first < units; first += simt::CtasY() * kUnitsAtOnce) {
    Unit held[kUnderWay] = {};
    KVASIR_UNROLL
    for (int k = 0; k < kUnderWay; ++k) {
      const int64_t i = first + int64_t{kThreads} * k;
      if (i < units) held[k] = LoadUnit(from + i);
    }
    KVASIR_UNROLL
    for (int k = 0; k < kUnderWay; ++k) {
      const int64_t i = first + int64_t{kThreads} * k;
      if (i < units) simt::StoreGlobal(to + i, held[k]);
    }
  }
}

template <typename Unit>
void LaunchCopyPages(const CopyPagesArgs& args, Launcher& launcher) {
  const int64_t units = args.page_bytes / static_cast<int64_t>(sizeof(Unit));
  KernelLaunch launch;
  launch.name = "copy_pages";
  launch.grid_x = simt::Ctas(args.num_pairs);
  launch.grid_y = std::min(simt::Ctas(units, kUnitsAtOnce), simt::kMostCtasY);
  launch.threads = kThreads;
  simt::Launch(launcher, launch, CopyPagesKernel<Unit>, args);
}

}  // namespace

void CopyPagesCuda(const CopyPagesArgs& args, Launcher& launcher) {
  const auto begin = reinterpret_cast<uintptr_t>(args.from) |
                     reinterpret_cast<uintptr_t>(args.to) |
                     static_cast<uintptr_t>(args.page_bytes);
  if (begin % sizeof(simt::Vec16) == 0) {
    LaunchCopyPages<simt::Vec16>(args, launcher);
  } else if (begin % sizeof(uint32_t) == 0) {
    LaunchCopyPages<uint32_t>(args, launcher);
  } else {
    LaunchCopyPages<uint8_t>(args, launcher);
  }
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
