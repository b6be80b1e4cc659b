// Macros and types with which the same kernel source is compiled for two
// targets: by nvcc for a GPU, and by the host's compiler for the emulator
// (kernels/emulation). Every primitive in this folder has one body for each
// target; the comment above it is the contract of both. Kernels are in
// namespace KVASIR_SIMT_TARGET, so one program may contain both forms. C++17.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_runtime.h>
#define KVASIR_SIMT_TARGET gpu
#define KVASIR_DEVICE __device__ __forceinline__
// Declares a kernel whose CTAs have at most `threads` threads.
#define KVASIR_KERNEL(threads) __global__ void __launch_bounds__(threads)
// Like KVASIR_KERNEL, but also limits the registers per thread, so that at
// least `ctas` CTAs fit on a multiprocessor.
#define KVASIR_KERNEL_OF(threads, ctas) \
  __global__ void __launch_bounds__(threads, ctas)
#define KVASIR_UNROLL _Pragma("unroll")
// Written before a loop of unknown length to prevent nvcc from unrolling it
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

// The source line from which a primitive is called. The emulator uses it to
// report faults, to count accesses, and in tests to leave out single
// operations. nvcc ignores it. Two calls in the same line are the same site.
#ifdef __CUDACC__
struct Site {
  static KVASIR_DEVICE constexpr Site Here() { return {}; }
};
#else
using Site = emulation::Site;
#endif

inline constexpr uint32_t kWarp = 32;
inline constexpr uint32_t kWholeWarp = 0xffffffffu;

// The threads for which an atomic or a fence orders accesses: those of the CTA,
// or all of the device.
enum class Scope : uint8_t { kCta, kGpu };

// Returns the bits of `from` as another type of the same size.
template <typename To, typename From>
KVASIR_DEVICE To BitsAs(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "sizes differ");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// 16 aligned bytes, the most that a thread can load or store at a time.
struct alignas(16) Vec16 {
  uint32_t word[4];
};

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET::simt
