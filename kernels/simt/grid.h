// Indices of threads and CTAs, shared memory, barriers and fences. C++17.
#pragma once

#include "kernels/simt/target.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET::simt {

// The index of the thread in its CTA and of the CTA in its grid, and the
// numbers of threads and CTAs.
#ifdef __CUDACC__
KVASIR_DEVICE uint32_t Thread() { return threadIdx.x; }
KVASIR_DEVICE uint32_t Threads() { return blockDim.x; }
KVASIR_DEVICE uint32_t CtaX() { return blockIdx.x; }
KVASIR_DEVICE uint32_t CtaY() { return blockIdx.y; }
KVASIR_DEVICE uint32_t CtasX() { return gridDim.x; }
KVASIR_DEVICE uint32_t CtasY() { return gridDim.y; }
#else
inline uint32_t Thread() { return emulation::Here().thread; }
inline uint32_t Threads() { return emulation::Here().threads; }
inline uint32_t CtaX() { return emulation::Here().cta_x; }
inline uint32_t CtaY() { return emulation::Here().cta_y; }
inline uint32_t CtasX() { return emulation::Here().ctas_x; }
inline uint32_t CtasY() { return emulation::Here().ctas_y; }
#endif
KVASIR_DEVICE uint32_t Lane() { return Thread() % kWarp; }
KVASIR_DEVICE uint32_t Warp() { return Thread() / kWarp; }

// The CTA's dynamic shared memory (KernelLaunch::shared_bytes), aligned to 128
// bytes. All shared memory is dynamic. Its initial contents are undefined.
KVASIR_DEVICE char* Shared() {
#ifdef __CUDACC__
  extern __shared__ __align__(128) char shared[];
  return shared;
#else
  return emulation::SharedMemory();
#endif
}

#ifdef __CUDACC__
// Converts a pointer into shared memory to the 32-bit address that PTX
// instructions on shared memory use.
KVASIR_DEVICE uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
#endif

// A barrier for all threads of the CTA. After it, each thread sees everything
// that the others did before it. Every thread must call it at the same source
// line, and none may have ended.
KVASIR_DEVICE void SyncCta(Site site = Site::Here()) {
#ifdef __CUDACC__
  (void)site;
  __syncthreads();
#else
  emulation::SyncCta(site);
#endif
}

// Both functions use named barrier `id` (1 to 15) for `threads` threads of the
// CTA (whole warps), which may call them at different source lines. SyncBarrier
// arrives and waits; ArriveBarrier only arrives.
KVASIR_DEVICE void SyncBarrier(uint32_t id, uint32_t threads,
                               Site site = Site::Here()) {
#ifdef __CUDACC__
  (void)site;
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#else
  emulation::Barrier(id, threads, /*waits=*/true, site);
#endif
}
KVASIR_DEVICE void ArriveBarrier(uint32_t id, uint32_t threads,
                                 Site site = Site::Here()) {
#ifdef __CUDACC__
  (void)site;
  asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
#else
  emulation::Barrier(id, threads, /*waits=*/false, site);
#endif
}

// A barrier for the lanes of `mask`, which must include the caller. After it,
// each lane sees everything that the others did before it.
KVASIR_DEVICE void SyncWarp(uint32_t mask = kWholeWarp,
                            Site site = Site::Here()) {
#ifdef __CUDACC__
  (void)site;
  __syncwarp(mask);
#else
  emulation::SyncWarp(mask, site);
#endif
}

// An acquire and release fence of the given scope. All accesses of this thread
// before the fence happen before its later atomic, relaxed and volatile
// accesses. Its earlier atomic, relaxed and volatile accesses happen before all
// its later accesses. Another thread in the scope sees this order if it also
// uses a fence, or an acquire or release access.
template <Scope scope>
KVASIR_DEVICE void Fence(Site site = Site::Here()) {
#ifdef __CUDACC__
  (void)site;
  if constexpr (scope == Scope::kCta) {
    __threadfence_block();
  } else {
    __threadfence();
  }
#else
  emulation::Fence(scope == Scope::kGpu, site);
#endif
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET::simt
