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
// The form of an address that instructions on shared memory take.
KVASIR_DEVICE uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
#endif

// Waits for all threads of the CTA. Afterwards each sees everything that any of
// them did before. Every thread must make the same call, and none may have
// ended.
KVASIR_DEVICE void SyncCta(Site site = Site::Here()) {
#ifdef __CUDACC__
  (void)site;
  __syncthreads();
#else
  emulation::SyncCta(site);
#endif
}

// Barrier `id` (1 to 15) of `threads` threads (whole warps) of the CTA, which
// may call it from different places. SyncBarrier arrives and waits;
// ArriveBarrier only arrives.
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

// Waits for the lanes of `mask`, which includes the caller's. Afterwards each
// sees everything that any of them did before.
KVASIR_DEVICE void SyncWarp(uint32_t mask = kWholeWarp,
                            Site site = Site::Here()) {
#ifdef __CUDACC__
  (void)site;
  __syncwarp(mask);
#else
  emulation::SyncWarp(mask, site);
#endif
}

// A fence of the given scope. Everything this thread did before is ordered
// before its own later atomic, relaxed and volatile accesses; such accesses
// before the fence are ordered before everything it does after. This holds
// towards threads in scope that also fence, or acquire and release.
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
