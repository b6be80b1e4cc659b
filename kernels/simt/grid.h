// Where a thread is, and what waits for other threads: indices, shared memory,
// barriers, fences. C++17.
#pragma once

#include "kernels/simt/target.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET::simt {

// Of the thread in its CTA, of the CTA in its grid, and how many there are.
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
// bytes. All shared memory is dynamic. It starts with any content.
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

// All threads of the CTA arrive, and see what any of them did before. Every
// thread comes to the same call; none has ended.
KVASIR_DEVICE void SyncCta(Site site = Site::Here()) {
#ifdef __CUDACC__
  (void)site;
  __syncthreads();
#else
  emulation::SyncCta(site);
#endif
}

// `threads` threads (whole warps) of the CTA arrive at barrier `id` (1 to 15),
// from wherever they are: some wait (Sync), others only arrive.
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

// The lanes of `mask`, the caller's among them, arrive and see what any of
// them did before.
KVASIR_DEVICE void SyncWarp(uint32_t mask = kWholeWarp,
                            Site site = Site::Here()) {
#ifdef __CUDACC__
  (void)site;
  __syncwarp(mask);
#else
  emulation::SyncWarp(mask, site);
#endif
}

// Orders what this thread did before against its own atomics, relaxed and
// volatile accesses after it, and those before it against what it does after,
// for the threads in scope that fence (or acquire and release) likewise.
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
