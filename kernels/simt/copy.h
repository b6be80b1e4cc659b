// Asynchronous copies from global to shared memory. Until a thread has waited
// for a copy, the contents of the destination are undefined and the source must
// not change. C++17.
#pragma once

#include "kernels/simt/grid.h"
#include "kernels/simt/target.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET::simt {

// Starts an asynchronous copy of `bytes` bytes (4, 8 or 16). Both addresses
// must be aligned to `bytes`. Copies of 16 bytes bypass the first-level cache.
template <int bytes>
KVASIR_DEVICE void CopyAsync(void* shared, const void* global,
                             Site site = Site::Here()) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16,
                "copies have 4, 8 or 16 bytes");
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

// Makes one group of all copies that this thread started since the last commit.
// The group may be empty.
KVASIR_DEVICE void CommitCopies(Site site = Site::Here()) {
#ifdef __CUDACC__
  (void)site;
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  emulation::CommitCopies(site);
#endif
}

// Waits until at most the last `pending` groups of this thread are unfinished.
// Other threads see the copied data only after a barrier.
template <int pending>
KVASIR_DEVICE void WaitCopies(Site site = Site::Here()) {
#ifdef __CUDACC__
  (void)site;
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#else
  emulation::WaitCopies(pending, site);
#endif
}

// A barrier in shared memory (8 bytes) that waits for bulk copies. A phase of
// the barrier ends when `count` threads have arrived and all announced bytes
// have been copied; then the next phase begins. The first phase is number 0.
// Bulk copies need sm_90: a kernel compiled for sm_80 traps in the functions
// below.
struct alignas(8) CopyBarrier {
  uint64_t state;
};

// Initializes a CopyBarrier. Only one thread may call it. Before they use the
// barrier, all its threads must meet at another one, such as SyncCta.
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

// Arrives once at the barrier, and announces that bulk copies will add `bytes`
// bytes to its phase. Threads that wait for the phase see everything that this
// thread did before.
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
// Waits until phase number `phase` has ended.
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

// Starts a bulk copy of `bytes` bytes, a multiple of 16. Both addresses must be
// aligned to 16 bytes. Called by one thread. When the bytes have arrived, they
// count for the current phase of `barrier`.
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
