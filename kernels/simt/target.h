// One kernel source for two targets: nvcc, and the host's compiler with the
// SIMT runtime of kernels/emulation. C++17. Every primitive of this folder is a
// wrapper with one body for each target. The comment above it is the contract
// of both. Kernels are in namespace KVASIR_SIMT_TARGET, so one program may
// contain both forms.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_runtime.h>
#define KVASIR_SIMT_TARGET gpu
#define KVASIR_DEVICE __device__ __forceinline__
// A kernel for CTAs of at most `threads`.
#define KVASIR_KERNEL(threads) __global__ void __launch_bounds__(threads)
// Like KVASIR_KERNEL. It limits a thread's registers so that a multiprocessor
// has room for `ctas` CTAs.
#define KVASIR_KERNEL_OF(threads, ctas) \
  __global__ void __launch_bounds__(threads, ctas)
#define KVASIR_UNROLL _Pragma("unroll")
// Stands before a loop of unknown length, which nvcc would otherwise unroll
// four times.
#define KVASIR_NO_UNROLL _Pragma("unroll 1")
#else
#include "kernels/emulation/primitives.h"
#define KVASIR_SIMT_TARGET emulated
#define KVASIR_DEVICE inline
#define KVASIR_KERNEL(threads) void
#define KVASIR_KERNEL_OF(threads, ctas) void
#define KVASIR_UNROLL
#define KVASIR_NO_UNROLL
#endif

namespace kvasir::kernels::KVASIR_SIMT_TARGET::simt {

// The place in the source from which a primitive is called. The emulator
// reports, counts and leaves out operations by site. nvcc ignores it. Two calls
// in one line are one site.
#ifdef __CUDACC__
struct Site {
  static KVASIR_DEVICE constexpr Site Here() { return {}; }
};
#else
using Site = emulation::Site;
#endif

inline constexpr uint32_t kWarp = 32;
inline constexpr uint32_t kWholeWarp = 0xffffffffu;

// The threads that see an ordering: those of the CTA, or of the device.
enum class Scope : uint8_t { kCta, kGpu };

// Reinterprets the bits as another type of the same size.
template <typename To, typename From>
KVASIR_DEVICE To BitsAs(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "sizes differ");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// 16 aligned bytes, the most that one load or store moves.
struct alignas(16) Vec16 {
  uint32_t word[4];
};

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET::simt
