// Copies from global to shared memory that run beside the thread that asked for
// them. Until they are waited for the destination holds anything, and the
// source must stay. C++17.
#pragma once

#include "kernels/simt/grid.h"
#include "kernels/simt/target.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET::simt {

// `bytes` of 4, 8 or 16 (which pass the first-level cache by), both sides
// aligned to them.
template <int bytes>
KVASIR_DEVICE void CopyAsync(void* shared, const void* global,
                             Site site = Site::Here()) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16, "width");
#ifdef __CUDACC__
  (void)site;
  if constexpr (bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                     SharedAddress(shared)),
                 "l"(global)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(
                     SharedAddress(shared)),
                 "l"(global), "n"(bytes)
                 : "memory");
  }
#else
  emulation::CopyAsync(shared, global, bytes, site);
#endif
}

// What this thread asked for since the last commit is one group, even if it is
// none.
KVASIR_DEVICE void CommitCopies(Site site = Site::Here()) {
#ifdef __CUDACC__
  (void)site;
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  emulation::CommitCopies(site);
#endif
}

// Waits until at most the `pending` last groups of this thread are under way.
// Others see what has landed behind a barrier alone.
template <int pending>
KVASIR_DEVICE void WaitCopies(Site site = Site::Here()) {
#ifdef __CUDACC__
  (void)site;
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#else
  emulation::WaitCopies(pending, site);
#endif
}

// A barrier in shared memory (8 bytes) whose phase ends when `count` arrivals
// and all bytes that were announced are in. Phases count from 0. Bulk copies
// are sm_90's: a kernel for sm_80 traps in these.
struct alignas(8) CopyBarrier {
  uint64_t state;
};

// By one thread, before a barrier of those that use it.
KVASIR_DEVICE void InitCopyBarrier(CopyBarrier* barrier, uint32_t count,
                                   Site site = Site::Here()) {
#ifdef __CUDACC__
  (void)site;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(count)
      : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#else
  (void)barrier, (void)count;
  asm volatile("trap;");
#endif
#else
  emulation::InitCopyBarrier(barrier, count, site);
#endif
}

// One arrival, which orders what this thread did before against those that
// wait; and `bytes` more to come by bulk copies.
KVASIR_DEVICE void ArriveExpecting(CopyBarrier* barrier, uint32_t bytes,
                                   Site site = Site::Here()) {
#ifdef __CUDACC__
  (void)site;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   SharedAddress(barrier)),
               "r"(bytes)
               : "memory");
#else
  (void)barrier, (void)bytes;
  asm volatile("trap;");
#endif
#else
  emulation::ArriveExpecting(barrier, bytes, site);
#endif
}
// Waits for the end of `phase`, by its parity.
KVASIR_DEVICE void WaitPhase(CopyBarrier* barrier, uint32_t phase,
                             Site site = Site::Here()) {
#ifdef __CUDACC__
  (void)site;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n .reg .pred p;\n"
        " mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(SharedAddress(barrier)), "r"(phase % 2)
        : "memory");
  }
#else
  (void)barrier, (void)phase;
  asm volatile("trap;");
#endif
#else
  emulation::WaitPhase(barrier, phase, site);
#endif
}

// A run of `bytes` (16 at a time, both sides aligned to 16), by one thread;
// `barrier`'s phase gets the bytes when they are there.
KVASIR_DEVICE void CopyBulk(void* shared, const void* global, uint32_t bytes,
                            CopyBarrier* barrier, Site site = Site::Here()) {
#ifdef __CUDACC__
  (void)site;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1], %2, [%3];" ::"r"(SharedAddress(shared)),
      "l"(global), "r"(bytes), "r"(SharedAddress(barrier))
      : "memory");
#else
  (void)shared, (void)global, (void)bytes, (void)barrier;
  asm volatile("trap;");
#endif
#else
  emulation::CopyBulk(shared, global, bytes, barrier, site);
#endif
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET::simt
