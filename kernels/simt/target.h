// One kernel source, two targets: nvcc, and the host's compiler over the SIMT
// runtime of kernels/emulation. C++17. Every primitive of this folder is one
// wrapper with a body for each, side by side; what both promise is said above
// it. Kernels lie in namespace KVASIR_SIMT_TARGET, so that one program may hold
// both forms.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_runtime.h>
#define KVASIR_SIMT_TARGET gpu
#define KVASIR_DEVICE __device__ __forceinline__
// A kernel for CTAs of at most `threads`.
#define KVASIR_KERNEL(threads) __global__ void __launch_bounds__(threads)
// The same, of which a multiprocessor's registers have room for `ctas`.
#define KVASIR_KERNEL_OF(threads, ctas) \
  __global__ void __launch_bounds__(threads, ctas)
#define KVASIR_UNROLL _Pragma("unroll")
// A loop of unknown length, of which nvcc would write four turns.
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

// Where a primitive is called: the name of what the emulator reports, counts
// and leaves out. Nothing to nvcc. (Two in one line are one site.)
#ifdef __CUDACC__
struct Site {
  static KVASIR_DEVICE constexpr Site Here() { return {}; }
};
#else
using Site = emulation::Site;
#endif

inline constexpr uint32_t kWarp = 32;
inline constexpr uint32_t kWholeWarp = 0xffffffffu;

// Who sees an ordering: the threads of the CTA, or of the device.
enum class Scope : uint8_t { kCta, kGpu };

// The same bits as another type of the same size.
template <typename To, typename From>
KVASIR_DEVICE To BitsAs(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "sizes differ");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// 16 bytes, aligned: the widest load and store.
struct alignas(16) Vec16 {
  uint32_t word[4];
};

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET::simt
